"""Scripts of `RedisMetadata`. `KEYS[1]` is the prefix of all keys, `ARGV` begins with now and ttl in ms."""

from __future__ import annotations

PRELUDE = """
local P, now, ttl = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local call = redis.call
local function load(name)
  local raw = name and call('GET', P..'e:'..name)
  return raw and cmsgpack.unpack(raw)
end
local function of_block(hash) return call('GET', P..'b:'..hash) end
local function add(tenant, field, kib) call('HINCRBY', P..'u:'..tenant, field, kib) end
local function drop(name)
  local e = load(name)
  if not e then return 0 end
  for at = 1, #e.hashes, 16 do
    local hash = string.sub(e.hashes, at, at + 15)
    if of_block(hash) == name then call('DEL', P..'b:'..hash) end
  end
  call('DEL', P..'e:'..name, P..'c:'..name, P..'p:'..name)
  call('ZREM', P..'x:'..e.tenant, name)
  add(e.tenant, 'used', -e.kib)
  return 1
end
local function pinned(name)
  call('ZREMRANGEBYSCORE', P..'p:'..name, '-inf', now)
  return call('EXISTS', P..'p:'..name) == 1
end
local function end_lease(tenant, name)
  local kib = call('HGET', P..'k:'..tenant, name)
  if not kib then return 0 end
  call('HDEL', P..'k:'..tenant, name)
  call('ZREM', P..'r:'..tenant, name)
  call('DEL', P..'l:'..name)
  add(tenant, 'reserved', -kib)
  return 1
end
local function expire(tenant)
  for _, name in ipairs(call('ZRANGEBYSCORE', P..'r:'..tenant, '-inf', now)) do end_lease(tenant, name) end
  for _, name in ipairs(call('ZRANGEBYSCORE', P..'x:'..tenant, '-inf', now - ttl)) do
    if not pinned(name) then drop(name) end
  end
end
"""
MATCH = """
local chain, pos, out = ARGV[3], 0, {}
local total = #chain / 16
while pos < total do
  local name = of_block(string.sub(chain, pos * 16 + 1, pos * 16 + 16))
  local e = load(name)
  if not e or pos < e.first then break end
  local at = pos
  while at < total and at < e.first + e.n do
    local own = (at - e.first) * 16
    if string.sub(e.hashes, own + 1, own + 16) ~= string.sub(chain, at * 16 + 1, at * 16 + 16) then break end
    at = at + 1
  end
  if at == pos or tonumber(call('ZSCORE', P..'x:'..e.tenant, name) or 0) <= now - ttl then break end
  call('ZADD', P..'x:'..e.tenant, now, name)
  out[#out + 1], out[#out + 2] = e.where, e.first
  pos = at
end
return {pos, out}
"""
RESERVE = """
local tenant, holder, lease_ms, limit = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
expire(tenant)
local own_limit = call('HGET', P..'u:'..tenant, 'max')
if own_limit then limit = tonumber(own_limit) end
local given, out = {}, {}
for i = 7, #ARGV, 3 do
  local name, hash, kib = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local there, who = load(of_block(hash)), call('GET', P..'l:'..name)
  local is_there = there and there.n >= string.byte(name, 33)
  local is_held = who and who ~= tenant..'/'..holder
  out[#out + 1] = is_there and 0 or -1
  if not is_there and not is_held then
    end_lease(tenant, name)
    local function short()
      local sums = call('HMGET', P..'u:'..tenant, 'used', 'reserved')
      return (tonumber(sums[1]) or 0) + (tonumber(sums[2]) or 0) + kib - limit
    end
    if limit > 0 and kib <= limit and short() > 0 then
      for _, old in ipairs(call('ZRANGE', P..'x:'..tenant, 0, -1)) do
        if short() <= 0 then break end
        if not pinned(old) then drop(old) end
      end
    end
    if limit > 0 and short() > 0 then
      for _, back in ipairs(given) do end_lease(tenant, back) end
      return false
    end
    call('SET', P..'l:'..name, tenant..'/'..holder, 'PX', lease_ms)
    call('HSET', P..'k:'..tenant, name, kib)
    call('ZADD', P..'r:'..tenant, now + lease_ms, name)
    add(tenant, 'reserved', kib)
    given[#given + 1], out[#out] = name, lease_ms
  end
end
return out
"""
COMMIT = """
local name, holder, where, hashes = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local tenant, first, kib = ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9])
if call('GET', P..'l:'..name) == tenant..'/'..holder then end_lease(tenant, name) end
local n, won, same = #hashes / 16, 0, load(name)
if same then return same.where == where and 1 or 0 end
for at = 1, #hashes, 16 do
  local hash = string.sub(hashes, at, at + 15)
  local old = of_block(hash)
  local e = load(old)
  if not e or e.n < n then
    call('SET', P..'b:'..hash, name)
    won = won + 1
    if e and call('DECR', P..'c:'..old) == 0 then drop(old) end
  end
end
if won == 0 then return 0 end
local e = {where = where, hashes = hashes, first = first, n = n, tenant = tenant, kib = kib}
call('SET', P..'e:'..name, cmsgpack.pack(e))
call('SET', P..'c:'..name, won)
call('ZADD', P..'x:'..tenant, now, name)
add(tenant, 'used', kib)
return 1
"""
ABORT = """
local count = 0
for i = 5, #ARGV do
  if call('GET', P..'l:'..ARGV[i]) == ARGV[3]..'/'..ARGV[4] then
    count = count + end_lease(ARGV[3], ARGV[i])
  end
end
return count
"""
FORGET = """
local e = load(ARGV[3])
return (e and e.where == ARGV[4]) and drop(ARGV[3]) or 0
"""
EVICT = """
local count = 0
for at = 1, #ARGV[3], 16 do
  local name = of_block(string.sub(ARGV[3], at, at + 15))
  if name then count = count + drop(name) end
end
return count
"""
PIN = """
local count = 0
for i = 5, #ARGV do
  if load(ARGV[i]) then
    call('ZADD', P..'p:'..ARGV[i], now + tonumber(ARGV[4]), ARGV[3])
    count = count + 1
  end
end
return count
"""
UNPIN = """
local count = 0
for i = 4, #ARGV do count = count + call('ZREM', P..'p:'..ARGV[i], ARGV[3]) end
return count
"""
