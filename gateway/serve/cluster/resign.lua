-- Lead no longer, where this member leads. ARGV[1]: its name.
local leader = redis.call('GET', KEYS[1] .. 'leader')
local at, who = string.match(leader or '', '^(%d+) (.*)$')
if who == ARGV[1] then
  redis.call('HSET', KEYS[1] .. 'term', 'resigned', at)
  redis.call('DEL', KEYS[1] .. 'leader')
end
return 1
