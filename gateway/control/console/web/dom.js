// Elements and words. Whatever comes from the gateway becomes text and nothing else.

export function el(tag, kind, ...parts) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.append(...parts.filter((part) => part !== null && part !== undefined).map((part) => part instanceof Node ? part : String(part)));
  return made;
}

export function button(text, does, kind) {
  const made = el("button", kind, text);
  made.type = "button";
  made.addEventListener("click", does);
  return made;
}

export function labelled(text, field) {
  const made = el("label", "small", text + " ", field);
  return made;
}

export function choices(names, first) {
  const made = el("select");
  fillChoices(made, names, first);
  return made;
}

export function fillChoices(select, names, first) {
  const wanted = first === undefined ? names : [first, ...names];
  if (select.options.length === wanted.length && wanted.every((name, at) => select.options[at].text === name)) return;
  const chosen = select.value;
  select.replaceChildren(...wanted.map((name, at) => {
    const made = el("option", "", name);
    made.value = first !== undefined && at === 0 ? "" : name;
    return made;
  }));
  if ([...select.options].some((option) => option.value === chosen)) select.value = chosen;
}

export function say(node, text, kind) {
  if (node.textContent !== text) node.textContent = text;
  if (kind !== undefined && node.className !== kind) node.className = kind;
}

// `names`: of the columns; those that begin with a space are texts.
export function table(names, words) {
  const body = el("tbody"), head = el("tr");
  for (const name of names) { const cell = el("th", name[0] === " " ? "text" : "", name.trim()); cell.scope = "col"; head.append(cell); }
  body.names = names;
  const wide = el("div", "card wide", el("table", "", el("thead", "", head), body));
  wide.tabIndex = 0;
  wide.setAttribute("role", "region");
  wide.setAttribute("aria-label", words);
  return [wide, body];
}

// Rows of a table, one for each key: made once, filled again when their entry has changed.
export class Rows {
  constructor(body, fill) { this.body = body; this.fill = fill; this.rows = new Map(); }
  show(pairs) {
    const seen = new Set();
    pairs.forEach(([key, entry], at) => {
      seen.add(key);
      let known = this.rows.get(key);
      if (!known) {
        const row = el("tr"), name = el("th");
        name.scope = "row";
        row.append(name);
        for (const word of this.body.names.slice(1)) {
          const cell = el("td");
          cell.dataset.name = word.trim();
          row.append(cell);
        }
        known = {row, entry: undefined};
        this.rows.set(key, known);
      }
      if (this.body.children[at] !== known.row) this.body.insertBefore(known.row, this.body.children[at] || null);
      if (known.entry !== entry) { known.entry = entry; this.fill(known.row.children, key, entry); }
    });
    for (const [key, {row}] of this.rows) if (!seen.has(key)) { row.remove(); this.rows.delete(key); }
  }
}

// A long list of which only the rows in sight are elements. All rows have one height, in rem.
export class LongList {
  constructor(words, height, make, fill) {
    this.node = el("div", "card list");
    this.node.tabIndex = 0;
    this.node.setAttribute("role", "list");
    this.node.setAttribute("aria-label", words);
    this.space = el("div");
    this.space.setAttribute("role", "presentation");
    this.node.append(this.space);
    this.height = height; this.make = make; this.fill = fill;
    this.items = []; this.rows = new Map();
    this.waiting = false;
    this.node.addEventListener("scroll", () => this.later());
    new ResizeObserver(() => this.later()).observe(this.node);
  }
  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }
  show(items) { this.items = items; this.later(); }
  draw() {
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize), high = this.height() * rem;
    const total = Math.min(this.items.length * high, 15e6), tall = total + "px";
    if (this.space.style.height !== tall) this.space.style.height = tall;
    const wanted = Math.min(total + 2, innerHeight * .6) + "px";
    if (this.node.style.height !== wanted) this.node.style.height = wanted;
    const first = Math.max(0, Math.floor(this.node.scrollTop / high) - 3);
    const last = Math.min(this.items.length, Math.ceil((this.node.scrollTop + this.node.clientHeight) / high) + 3);
    const seen = new Set();
    for (let at = first; at < last; at++) {
      const [key, entry] = this.items[at];
      seen.add(key);
      let known = this.rows.get(key);
      if (!known) {
        known = {row: this.make(key), entry: undefined, at: -1};
        known.row.classList.add("row");
        known.row.setAttribute("role", "listitem");
        this.rows.set(key, known);
        this.node.append(known.row);
      }
      if (known.at !== at || known.high !== high) {
        known.at = at; known.high = high;
        known.row.style.top = at * high + "px";
        known.row.style.height = high + "px";
        known.row.setAttribute("aria-posinset", at + 1);
      }
      known.row.setAttribute("aria-setsize", this.items.length);
      if (known.entry !== entry) { known.entry = entry; this.fill(known.row, key, entry); }
    }
    for (const [key, {row}] of this.rows) {
      if (!seen.has(key) && !row.contains(document.activeElement)) { row.remove(); this.rows.delete(key); }
    }
  }
}

export function count(number) {
  for (const [size, unit, by] of [[1e9, "G", 1e9], [1e6, "M", 1e6], [1e4, "k", 1e3]])
    if (number >= size) return (number / by).toFixed(1) + unit;
  return String(number);
}
export function seconds(value) {
  if (value === null || value === undefined) return "-";
  return value === 0 ? "0" : value < 1 ? Math.round(value * 1000) + " ms" : value < 100 ? value.toFixed(1) + " s" : Math.round(value) + " s";
}
export const share = (value) => value === null || value === undefined ? "-" : Math.round(value * 100) + " %";
export function clock(unix) {
  return unix === null || unix === undefined ? "" : new Date(unix * 1000).toLocaleTimeString([], {hourCycle: "h23"});
}
let ahead = 0;  // seconds by which this browser's clock is ahead of the gateway's
export function setClock(unix) { ahead = Date.now() / 1000 - unix; }
export function now() { return Date.now() / 1000 - ahead; }
export function ago(unix) {
  const past = Math.max(0, now() - unix);
  return past < 90 ? Math.round(past) + " s ago" : past < 5400 ? Math.round(past / 60) + " min ago" : Math.round(past / 3600) + " h ago";
}
export function since(unix) { return unix === null || unix === undefined ? "" : ", since " + clock(unix); }
