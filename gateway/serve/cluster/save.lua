-- Save a checkpoint, where this member leads. ARGV: leader, checkpoint, its life in ms, money, its life in ms.
if redis.call('GET', KEYS[1] .. 'leader') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1] .. 'checkpoint', ARGV[2], 'PX', ARGV[3])
if ARGV[4] ~= '' then
  redis.call('SET', KEYS[1] .. 'money', ARGV[4], 'PX', ARGV[5])
  redis.call('HDEL', KEYS[1] .. 'term', 'lost')
end
return 1
