-- Leave the cluster in good order. ARGV: name, life, term of the member.
local p, name, life, term = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local leader = redis.call('GET', p .. 'leader')
if term == 0 or leader ~= string.format('%.0f %s', term, name) then
  local before = redis.call('GET', p .. 'member:' .. name)
  if before and cjson.decode(before).life ~= life then return 0 end
end -- as in a turn
redis.call('DEL', p .. 'member:' .. name)
redis.call('HDEL', p .. 'roster', name)
local at, who = string.match(leader or '', '^(%d+) (.*)$')
if who == name then
  redis.call('HSET', p .. 'term', 'resigned', at)
  redis.call('DEL', p .. 'leader')
end
local left = ''
for each in string.gmatch(redis.call('HGET', p .. 'term', 'seen') or '', '%S+') do
  if each ~= name then left = left .. ' ' .. each end
end
if redis.call('EXISTS', p .. 'term') == 1 then redis.call('HSET', p .. 'term', 'seen', left) end
return 1
