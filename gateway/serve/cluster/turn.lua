-- A turn of one member: it shows that it is there, learns who leads and who the members are, and may be elected.
-- KEYS[1]: prefix of the cluster's keys. ARGV: as in Store.turn.
local p, name, life, record = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local ttl, forgotten = tonumber(ARGV[4]), tonumber(ARGV[5])
local known, candidacy, term, number = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local seen, prints = ARGV[10], ARGV[11]
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)
local after = tonumber(ARGV[13])
if after and math.abs(now - after) > tonumber(ARGV[14]) then candidacy = 0 end
local resigned = redis.call('HGET', p .. 'term', 'resigned')
if ARGV[15] == '1' and resigned ~= string.format('%.0f', known) then candidacy = 0 end

local other = redis.call('GET', p .. 'token')
if other and not string.find(' ' .. prints .. ' ', ' ' .. other .. ' ', 1, true) then return {'token'} end
if term == 0 or redis.call('GET', p .. 'leader') ~= string.format('%.0f %s', term, name) then
  local before = redis.call('GET', p .. 'member:' .. name)
  if before and cjson.decode(before).life ~= life then return {'taken'} end
end -- else it leads, and whatever is in its place is a stranger's
redis.call('SET', p .. 'token', string.match(prints, '%S+'), 'PX', forgotten)
if ARGV[12] == '1' then redis.call('SET', p .. 'member:' .. name, record, 'PX', ttl) end

local had = tonumber(redis.call('HGET', p .. 'term', 'epoch') or '0')
local epoch = math.max(had, known)
local emptied = had < epoch or had == 0
if emptied then
  for each in string.gmatch(seen, '%S+') do redis.call('HSETNX', p .. 'roster', each, now) end
end
redis.call('HSET', p .. 'roster', name, now)

local leader, leads = redis.call('GET', p .. 'leader'), 0
if leader then
  local at, who = string.match(leader, '^(%d+) (.*)$')
  leads, leader = tonumber(at), who
  if leads < epoch or (leader == name and leads ~= term) then leader = false end
end
local known_to_leader = redis.call('HGET', p .. 'term', 'seen') or ''
if not leader then
  local listed = string.find(' ' .. known_to_leader .. ' ', ' ' .. name .. ' ', 1, true)
  if term > 0 and term == epoch then
    leader, leads = name, epoch
  elseif candidacy == 2 or (candidacy == 1 and (listed or (known_to_leader == '' and had >= known))) then
    leader, leads = name, math.max(epoch + 1, micros)
    if not listed then known_to_leader = known_to_leader .. ' ' .. name end
    redis.call('HSET', p .. 'term', 'seen', known_to_leader)
  end
end
local until_ = tonumber(redis.call('HGET', p .. 'term', 'emptied_until') or '0')
if leader == name then
  local last = tonumber(redis.call('HGET', p .. 'term', 'number') or '0')
  if term ~= leads or had < leads then last = 0 end
  if emptied then until_ = now + ttl end
  redis.call('SET', p .. 'leader', string.format('%.0f %s', leads, name), 'PX', ttl)
  redis.call('HSET', p .. 'term', 'epoch', leads, 'number', last, 'emptied_until', until_)
  if emptied and known > 0 then redis.call('HSET', p .. 'term', 'lost', 1) end
  if term > 0 and number > last then
    redis.call('HSET', p .. 'term', 'number', number, 'seen', seen .. ' ' .. name)
  end
end

local members = {}
local roster = redis.call('HGETALL', p .. 'roster')
for i = 1, #roster, 2 do
  local its = redis.call('GET', p .. 'member:' .. roster[i])
  if its or tonumber(roster[i + 1]) + ttl + forgotten > now then
    members[#members + 1] = {roster[i], its or ''}
  else
    redis.call('HDEL', p .. 'roster', roster[i])
  end
end
return {'ok', leader or '', leads, (emptied or now < until_) and 1 or 0, now, members,
  math.max(0, redis.call('PTTL', p .. 'leader'))}
