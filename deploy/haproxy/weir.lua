-- Calls of OpenAI-compatible clients, forwarded by HAProxy and decided by Weir's decide port (docs/decide.md).
--
--   setenv WEIR_DECIDE unix@/run/weir/decide.sock        or ipv4@10.0.0.5:8009
--   setenv WEIR_DECIDE_TOKEN_FILE /etc/haproxy/decide.token
--
-- `http-request lua.decide` asks, and waits as the call waits. A refusal is answered whole. A grant puts the engine's
-- address into txn.weir_address and txn.weir_port, and the engine's own header lines in place of the client's. The
-- filter `lua.weir` sends the body that was granted, reports the first byte and the end, and reads the usage in passing.

local where = assert(os.getenv("WEIR_DECIDE"), "setenv WEIR_DECIDE: the address of the decide port")
local token_file = os.getenv("WEIR_DECIDE_TOKEN_FILE")
local LONGEST = 3600 * 1000 -- milliseconds that a call may wait for its decision; its class's deadline is shorter
local REPORT_WITHIN = 10 * 1000
local token = nil
if token_file then
  local file = assert(io.open(token_file))
  token = file:read("*a"):match("^%s*(%S+)%s*$")
  file:close()
end

local calls = {} -- those that were asked for, by the id of their hold
local OWN = { -- headers of a grant that are neither the engine's nor the client's
  ["x-weir-hold"] = true, ["x-weir-upstream"] = true, ["x-weir-first-byte-within"] = true,
  ["x-weir-end-within"] = true, ["x-weir-hide-usage"] = true, ["content-type"] = true, ["content-length"] = true,
  ["connection"] = true, ["transfer-encoding"] = true,
}
local FAILURES = { [502] = "reset", [503] = "connect", [504] = "timeout" } -- of HAProxy's own answers
local NOT_ASKED = { -- headers of a client that are not the call's, or that only this proxy may set
  ["connection"] = true, ["content-length"] = true, ["transfer-encoding"] = true, ["expect"] = true,
  ["proxy-authorization"] = true, ["x-original-uri"] = true, ["x-forwarded-for"] = true,
  ["x-weir-hold"] = true,
}

local function ask(path, headers, body, timeout)
  if token then
    headers["proxy-authorization"] = { "Bearer " .. token }
  end
  return core.httpclient():post({
    url = "http://127.0.0.1" .. path, dst = where, headers = headers, body = body, timeout = timeout,
  })
end

local function report(hold, what, body)
  core.register_task(function()
    local answer = ask("/decide/" .. hold .. "/" .. what, { ["host"] = { "localhost" } }, body, REPORT_WITHIN)
    if answer.status ~= 204 then
      core.Warning("weir: " .. what .. " of a call was answered " .. tostring(answer.status))
    end
  end)
end

local function refuse(txn, status, headers, body)
  local reply = txn:reply({ status = status })
  for name, value in pairs(headers) do
    reply:add_header(name, value)
  end
  reply:set_body(body)
  txn:done(reply)
end

local function unavailable(txn, why)
  core.Alert("weir: " .. why)
  local body = '{"error":{"message":"Calls cannot be decided now.","type":"server_error","param":null,'
    .. '"code":"server_is_overloaded"}}'
  refuse(txn, 503, { ["content-type"] = "application/json", ["retry-after"] = "2" }, body)
end

core.register_action("decide", { "http-req" }, function(txn)
  local headers = {}
  for name, values in pairs(txn.http:req_get_headers()) do
    if not NOT_ASKED[name] then
      local list = {}
      for i = 0, #values do
        list[#list + 1] = values[i]
      end
      headers[name] = list
    end
  end
  local hold = txn.f:uuid() -- chosen here, so that the call can be withdrawn while it waits
  calls[hold] = {}
  txn:set_var("txn.weir_hold", hold)
  headers["x-weir-hold"] = { hold }
  headers["x-original-uri"] = { txn.f:url() }
  headers["x-forwarded-for"] = { txn.f:src() }
  local answer = ask("/decide", headers, txn.f:req_body() or "", LONGEST)
  if calls[hold] == nil then
    return -- its client has left, and Weir was told
  end
  if answer.status == 407 or not answer.status or answer.status == 0 or not answer.headers then
    calls[hold] = nil
    return unavailable(txn, "the decide port " .. where .. " answered " .. tostring(answer.status))
  end
  local told = {}
  for name, values in pairs(answer.headers) do
    told[name] = values[0]
  end
  if not told["x-weir-hold"] then
    calls[hold] = nil
    told["content-length"], told["connection"], told["transfer-encoding"] = nil, nil, nil
    return refuse(txn, answer.status, told, answer.body or "")
  end
  local address, port, base = told["x-weir-upstream"]:match("^http://([%d.]+):(%d+)(.*)$")
  local call = { hide = told["x-weir-hide-usage"] == "true", headers = {}, status = nil }
  calls[hold] = call
  if not address then
    return unavailable(txn, told["x-weir-upstream"] .. " is not http://ADDRESS:PORT, which is all that this example forwards to")
  end
  for name in pairs(txn.http:req_get_headers()) do
    if name ~= "content-length" and name ~= "transfer-encoding" then
      txn.http:req_del_header(name)
    end
  end
  txn.http:req_set_header("host", address .. ":" .. port)
  for name, value in pairs(told) do
    local of_engine = name:match("^x%-weir%-set%-(.+)$")
    if of_engine then
      txn.http:req_set_header(of_engine, value)
    elseif not OWN[name] then
      call.headers[name] = value
    end
  end
  if answer.status == 200 then
    call.body = answer.body
    txn.http:req_del_header("transfer-encoding")
    txn.http:req_set_header("content-length", tostring(#call.body))
  end
  if base ~= "" then
    txn.http:req_set_path(base .. txn.f:path())
  end
  txn:set_var("txn.weir_address", address)
  txn:set_var("txn.weir_port", port)
end)

local Weir = { id = "weir", flags = filter.FLT_CFG_FL_HTX }
Weir.__index = Weir

function Weir:new()
  return setmetatable({}, Weir)
end

local function ended(hold, body)
  if calls[hold] then
    report(hold, "end", body)
    calls[hold] = nil
  end
end

function Weir:http_headers(txn, message)
  if not message.channel:is_resp() then
    self.hold = txn:get_var("txn.weir_hold")
    self.call = self.hold and calls[self.hold]
    if self.call and self.call.body then
      filter.register_data_filter(self, message.channel)
    end
    return filter.CONTINUE
  end
  local call = self.call
  if not call then
    return filter.CONTINUE
  end
  call.status = tonumber(message:get_stline().code)
  call.stream = false
  for name, value in pairs(call.headers) do
    message:set_header(name, value)
  end
  local kinds = message:get_headers()["content-type"]
  if call.status < 400 and kinds and kinds[0]:find("^text/event%-stream") then
    call.stream = true
    report(self.hold, "first-byte", "")
  end
  if call.status < 400 then
    filter.register_data_filter(self, message.channel)
  end
  return filter.CONTINUE
end

function Weir:http_payload(txn, message)
  local call = self.call
  if not message.channel:is_resp() then
    if call.body then
      message:set(call.body)
      call.body = nil
    end
    return
  end
  local data = message:body()
  if not data then
    return
  end
  if data:find("[DONE]", -16, true) then
    call.done = true
  end
  local at = data:find('"usage":{', 1, true) or data:find('"usage": {', 1, true)
  if at then
    call.usage = data:match("%b{}", at) or call.usage
    if call.hide and call.stream then
      local rest = data:gsub('data: [^\n]*"choices":%[%],[^\n]*"usage":[^\n]*\n\n', "", 1)
      if rest ~= data then
        message:set(rest)
      end
    end
  end
end

local function complete(self)
  local usage = self.call.usage
  ended(self.hold, string.format('{"status":%d%s}', self.call.status, usage and ',"usage":' .. usage or ""))
end

function Weir:http_end(txn, message)
  if message.channel:is_resp() and self.hold then
    complete(self)
  end
  return filter.CONTINUE
end

function Weir:end_analyze(txn, channel)
  local hold = txn:get_var("txn.weir_hold")
  local call = hold and calls[hold]
  if call and channel:is_resp() then -- there was no end, or not even an answer to the question: the hold goes back
    if call.done then -- OpenAI's client leaves at [DONE], before the chunk that ends the body
      complete(self)
    elseif call.status then
      ended(hold, string.format('{"status":%d,"failure":"client_gone"}', call.status))
    else
      local failure = call.headers and FAILURES[txn:get_var("txn.weir_status")] or "client_gone"
      ended(hold, '{"failure":"' .. failure .. '"}')
    end
  end
  return filter.CONTINUE
end

core.register_filter("weir", Weir, function(made)
  return made
end)
