-- Lead no longer, where this member leads. ARGV[1]: its name.
local leader = redis.call('GET', KEYS[1] .. 'leader')
if leader and string.match(leader, '^%d+ (.*)$') == ARGV[1] then redis.call('DEL', KEYS[1] .. 'leader') end
return 1
