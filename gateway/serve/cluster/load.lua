-- The last checkpoint, and the milliseconds that it has still to live; nothing where there is none.
local found = redis.call('GET', KEYS[1] .. 'checkpoint')
if not found then return {} end
return {found, redis.call('PTTL', KEYS[1] .. 'checkpoint')}
