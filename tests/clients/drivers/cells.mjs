// Frame of a node client's program: it runs each cell, and prints a JSON line with the cell's end. As cells.py.

const env = process.env;
export const ROOT = env.WEIR_URL;
export const URL = `${ROOT}/v1`;
export const MODEL = env.WEIR_MODEL;
export const KEY = env.WEIR_KEY; // of a tenant without limits
export const SLOW = env.WEIR_SLOW_KEY; // of a tenant with one call a second
export const HELLO = [{ role: "user", content: "Why is the river level?" }];
export const LEVEL = {
  name: "level_of",
  description: "The level of a river, in centimetres.",
  parameters: { type: "object", properties: { river: { type: "string" } }, required: ["river"] },
};

export function check(held, said = "") {
  if (!held) throw new Error(`not so: ${typeof said === "string" ? said : JSON.stringify(said)}`);
}

// The error that `act` ends with.
export async function failing(act) {
  try {
    await act();
  } catch (error) {
    return error;
  }
  throw new Error("nothing was refused");
}

export async function times(count, act) {
  for (let at = 0; at < count; at += 1) await act();
}

export async function run(cells) {
  for (const [cell, act] of Object.entries(cells)) {
    let failure = "";
    try {
      await act();
    } catch (error) {
      failure = String(error?.stack ?? error);
    }
    console.log(JSON.stringify({ cell, failure }));
  }
}
