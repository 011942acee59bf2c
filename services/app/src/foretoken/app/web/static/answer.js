// The answer's page: all candidates ranked again under other limits and prices, drawn and listed; the best as they are simulated.
import { follow } from "./events.js";
import { COLOURS, Scatter, short } from "./scatter.js";

// What is asked, deployments or strategies, comes with the page: its columns, limits, axes and what ranks.
const SHOWN_ROWS = 200;
const DAY_S = 86400;
const byId = (id) => document.getElementById(id);
const controls = byId("controls");
const spec = JSON.parse(controls.dataset.spec);
const KEPT = [...spec.limits.map((limit) => limit.name), "rank", "colour", "words", ...(spec.run ? ["tokens"] : [])];

// ---- columns: words are places in a list ----
function open(columns) {
  const found = {};
  for (const [name, column] of Object.entries(columns)) {
    found[name] = Array.isArray(column) ? column : column.at.map((place) => column.words[place]);
  }
  return found;
}

function ceilingOf(values, isIn) {
  const found = values.filter((value, i) => isIn[i] && Number.isFinite(value)).sort((a, b) => a - b);
  return found.length ? found[Math.min(found.length - 1, Math.floor(found.length * 0.98))] : 1;
}

class Answer {
  constructor(columns) {
    this.c = open(columns);
    this.n = this.c.name.length;
    this.prices = {};
    this.sorted = { name: "place", down: false };
    // Those that other limits could let in.
    const near = new Set(spec.open);
    this.open = this.c.name.map((_, i) => !spec.open || near.has(this.c.verdict[i]));
    this.key = new Float64Array(this.n);
    this.words = this.c.name.map((_, i) => spec.words.map((one) => this.c[one][i]).join(" ").toLowerCase());
    this.isTie = new Uint8Array(this.n);
    this.tied = new Set(spec.ties);
    this.c.cost = new Array(this.n);
    this.order = [];
    this.limits = Object.fromEntries(spec.limits.map(({ name, column }) => [name, this.slider(name, this.c[column])]));
    if (controls.dataset.objective) byId("c-rank").value = controls.dataset.objective;
    this.addPrices();
    this.scatter = new Scatter(byId("scatter"), {
      x: Float64Array.from(this.c[spec.x.column], (value) => value ?? NaN),
      y: Float64Array.from(this.c[spec.y.column], (value) => value ?? NaN),
      low: this.c[spec.y.low], high: this.c[spec.y.high],
      xLabel: spec.x.label, yLabel: spec.y.label,
      onPoint: (i) => this.point(i),
      onZoom: () => { this.list(); this.keep(); },
    });
    this.body = byId("candidates").tBodies[0];
    for (const name of ["pointerover", "focusin"]) this.body.addEventListener(name, (event) => this.point(Number(event.target.closest("tr")?.dataset.at ?? -1)));
    this.body.addEventListener("pointerleave", () => this.point(-1));
    this.addHead();
    for (const name of KEPT.filter((one) => one !== "rank" && one !== "colour")) byId(`c-${name}`).addEventListener("input", () => this.rank());
    byId("c-interval").addEventListener("change", () => { this.addHead(); this.list(); this.keep(); });
    for (const id of ["c-rank", "c-colour"]) byId(id).addEventListener("change", () => this.rank());
    controls.addEventListener("submit", (event) => event.preventDefault());
    this.restore();
    this.rank();
    this.explain();
  }

  // A slider runs over all that could qualify; its end is no limit.
  slider(name, values) {
    const input = byId(`c-${name}`);
    const given = Number(input.dataset.limit) || 0;
    const top = Math.max(ceilingOf(values, this.open), given * 2);
    input.min = 0;
    input.max = 1000;
    input.value = given ? Math.round(1000 * Math.sqrt(given / top)) : 1000;
    return { input, top, given, out: byId(`o-${name}`) };
  }

  limitOf({ name, unit }) {
    const { input, top, given, out } = this.limits[name];
    const at = Number(input.value);
    const isAsked = given && at === Math.round(1000 * Math.sqrt(given / top));
    const limit = at >= 1000 ? Infinity : isAsked ? given : top * (at / 1000) ** 2;
    out.textContent = limit === Infinity ? "any" : `${short(limit)} ${unit}${isAsked ? ", as asked" : ""}`;
    return limit;
  }

  addPrices() {
    const given = {};
    for (let i = 0; i < this.n; i++) {
      // What a device costs an hour is in what tokens cost.
      const usd = (this.c[spec.cost.column][i] * this.c[spec.y.column][i] * 3600) / spec.cost.tokens;
      given[this.c.device[i]] ||= usd || 0;
    }
    this.given = given;
    for (const [device, usd] of Object.entries(given)) {
      const field = document.createElement("div");
      field.className = "field";
      const label = field.appendChild(document.createElement("label"));
      label.textContent = `USD an hour of one ${device}`;
      label.htmlFor = `c-price-${device}`;
      const input = field.appendChild(document.createElement("input"));
      Object.assign(input, { id: label.htmlFor, type: "number", min: 0, step: "any", value: usd ? Number(usd.toFixed(3)) : "" });
      input.addEventListener("input", () => { this.prices[device] = Number(input.value); this.rank(); });
      byId("prices").append(field);
    }
  }

  costOf(i) {
    const price = this.prices[this.c.device[i]];
    const known = this.c[spec.cost.column][i];
    if (price === undefined) return known || null;
    const tps = this.c[spec.y.column][i];
    return price && tps ? (price / 3600 / tps) * spec.cost.tokens : null;
  }

  rank() {
    const limits = spec.limits.map((limit) => [this.c[limit.column], this.limitOf(limit)]);
    const words = byId("c-words").value.toLowerCase().split(/\s+/).filter(Boolean);
    const c = this.c;
    const objective = byId("c-rank").value;
    const { column, down } = spec.objectives[objective];
    const sign = down ? -1 : 1;
    const key = this.key;
    const isIn = this.scatter.isIn;
    const inside = [];
    for (let i = 0; i < this.n; i++) {
      c.cost[i] = this.costOf(i);
      isIn[i] = this.open[i] && limits.every(([values, limit]) => values[i] <= limit) ? 1 : 0;
      if (isIn[i] && words.length && !words.every((word) => this.words[i].includes(word))) isIn[i] = 0;
      key[i] = c[column][i] === null ? Infinity : sign * c[column][i];
      if (isIn[i]) inside.push(i);
    }
    if (spec.run) this.wholeRun();
    this.ranks = Float64Array.from(inside, (i) => key[i]).sort();
    let best = inside[0];
    for (const i of inside) if (key[i] < key[best]) best = i;
    this.isTie.fill(0);
    // Of the best that was answered it is known which differ from it by less than the error of the difference; of another whose intervals reach it.
    const isAnswered = c.name[best] === spec.best && objective === controls.dataset.objective;
    const reaches = isAnswered ? (i) => this.tied.has(c.name[i]) : (i) => column === spec.y.column && c[spec.y.high][i] >= c[column][best];
    for (const i of inside) if (i !== best && reaches(i)) this.isTie[i] = 1;
    this.inside = inside;
    this.paint();
    this.list();
    const ties = this.isTie.reduce((sum, one) => sum + one, 0);
    byId("counted").textContent = inside.length
      ? `${inside.length.toLocaleString("en")} of ${this.n.toLocaleString("en")} meet the limits; best: ${this.describe(best)}${ties ? `; ${isAnswered ? "ties" : "intervals that reach it"}: ${ties.toLocaleString("en")}` : ""}`
      : `None of ${this.n.toLocaleString("en")} meets these limits: loosen one.`;
    this.keep();
  }

  // What a run of so many tokens takes, without failures.
  wholeRun() {
    const tokens = Number(byId("c-tokens").value);
    this.c.days = this.c.name.map((_, i) => (tokens && this.c.tokens_per_s[i] ? tokens / this.c.tokens_per_s[i] / DAY_S : null));
    this.c.usd = this.c.cost.map((usd) => (tokens && usd ? (usd * tokens) / spec.cost.tokens : null));
  }

  paint() {
    const by = byId("c-colour").value;
    const values = [...new Set(this.c[by])];
    const places = new Map(values.map((value, place) => [value, place % COLOURS.length]));
    for (let i = 0; i < this.n; i++) this.scatter.colour[i] = places.get(this.c[by][i]);
    byId("legend").replaceChildren(...values.slice(0, COLOURS.length).flatMap((value) => {
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = COLOURS[places.get(value)];
      return [swatch, document.createTextNode(String(value) || "as stored")];
    }));
  }

  // What is pointed at in the picture or in the table is marked in both.
  point(i) {
    byId("pointed").textContent = i < 0 ? "" : this.describe(i);
    this.scatter.mark(i);
    for (const row of this.body.rows) row.classList.toggle("pointed", row.dataset.at === String(i));
  }

  columns() { return spec.columns.filter(([, , kind]) => kind !== "interval" || byId("c-interval").checked); }

  addHead() {
    const row = document.createElement("tr");
    for (const [name, title] of this.columns()) {
      const head = row.appendChild(document.createElement("th"));
      head.scope = "col";
      if (typeof this.c[name]?.[0] === "number") head.className = "number";
      const button = head.appendChild(document.createElement("button"));
      button.type = "button";
      button.textContent = title;
      button.addEventListener("click", () => {
        this.sorted = { name, down: this.sorted.name === name && !this.sorted.down };
        this.list();
      });
    }
    byId("candidates").tHead.replaceChildren(row);
  }

  // Equal ones have the same place.
  placeOf(i) {
    let [low, high] = [0, this.ranks.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ranks[middle] < this.key[i]) low = middle + 1;
      else high = middle;
    }
    return low + 1;
  }

  // The rows that are shown: of numbers only those are sorted that can be among them.
  first(values, down) {
    const sign = down ? -1 : 1;
    let rows = this.scatter.zoom ? this.inside.filter((i) => this.scatter.shows(i)) : this.inside;
    byId("zoomed").textContent = this.scatter.zoom ? `The table has the ${rows.length.toLocaleString("en")} of the part that is zoomed in; Escape in the picture shows all.` : "";
    if (rows.length && typeof values[rows[0]] !== "string") {
      const keys = Float64Array.from(rows, (i) => sign * (values[i] ?? Infinity));
      const last = keys.slice().sort()[Math.min(SHOWN_ROWS, keys.length) - 1];
      rows = rows.filter((_, at) => keys[at] <= last);
    }
    const compare = (a, b) => {
      const [x, y] = [values[a] ?? Infinity, values[b] ?? Infinity];
      return (x < y ? -sign : x > y ? sign : 0) || this.key[a] - this.key[b] || a - b;
    };
    return [...rows].sort(compare).slice(0, SHOWN_ROWS);
  }

  list() {
    const { name, down } = this.sorted;
    const order = this.first(name === "place" ? this.key : this.c[name], down);
    const heads = byId("candidates").tHead.rows[0].cells;
    this.scatter.barred = byId("c-interval").checked ? order : [];
    this.scatter.draw();
    this.columns().forEach(([column], place) => {
      if (column === name) heads[place].ariaSort = down ? "descending" : "ascending";
      else heads[place].removeAttribute("aria-sort");
    });
    byId("candidates").tBodies[0].replaceChildren(...order.map((i) => this.row(i)));
  }

  row(i) {
    const row = document.createElement("tr");
    row.dataset.at = i;
    for (const [name, , kind] of this.columns()) {
      const isName = name === "name";
      const cell = row.appendChild(document.createElement(isName ? "th" : "td"));
      if (isName) cell.scope = "row";
      const value = name === "place" ? this.placeOf(i) : this.c[name][i];
      cell.textContent = name === "place" ? `${value}${this.isTie[i] ? " tie" : ""}` : typeof value === "number" ? (kind === "share" ? `${(100 * value).toFixed(1)} %` : short(value)) : value === "" ? "as stored" : value ?? "-";
      if (typeof value === "number") cell.className = "number";
    }
    return row;
  }

  describe(i) {
    const c = this.c;
    const why = c.reason?.[i] ? ` (${c.verdict[i]}: ${c.reason[i]})` : "";
    return spec.describe.replace(/\{(\w+)\}/g, (_, name) => (typeof c[name][i] === "string" ? c[name][i] : short(c[name][i]))) + why;
  }

  // An example of each reason for which candidates are out.
  explain() {
    if (!this.c.verdict) return;
    for (const place of document.querySelectorAll("[data-verdict]")) {
      const i = this.c.verdict.indexOf(place.dataset.verdict);
      if (i >= 0) place.textContent = `, such as ${this.c.name[i]}: ${this.c.reason[i] || "no further reason"}`;
    }
  }

  // What is set stands in the address, so that a link shows the same.
  keep() {
    const said = new URLSearchParams(location.search);
    for (const name of KEPT) {
      const value = byId(`c-${name}`).value;
      if (value && value !== this.start?.[name]) said.set(name, value);
      else said.delete(name);
    }
    for (const [device, usd] of Object.entries(this.prices)) said.set(`price.${device}`, usd);
    const { zoom } = this.scatter;
    if (byId("c-interval").checked) said.set("interval", "on"); else said.delete("interval");
    if (zoom) said.set("zoom", zoom.map((value) => Number(value.toPrecision(5))).join(",")); else said.delete("zoom");
    clearTimeout(this.keeping);
    this.keeping = setTimeout(() => history.replaceState(null, "", said.size ? `?${said}` : location.pathname), 200);
  }

  restore() {
    this.start = Object.fromEntries(KEPT.map((name) => [name, byId(`c-${name}`).value]));
    for (const [name, value] of new URLSearchParams(location.search)) {
      if (name in this.start) byId(`c-${name}`).value = value;
      if (name === "interval") { byId("c-interval").checked = true; this.addHead(); }
      if (name === "zoom") {
        const zoom = value.split(",").map(Number);
        if (zoom.length === 4 && zoom.every(Number.isFinite)) this.scatter.zoom = zoom;
      }
      if (name.startsWith("price.")) {
        const device = name.slice("price.".length);
        const input = byId(`c-price-${device}`);
        if (input) { input.value = value; this.prices[device] = Number(value); }
      }
    }
  }
}

const answered = await fetch(controls.dataset.candidates);
if (answered.ok) new Answer(await answered.json());
else byId("counted").textContent = "The candidates of this answer are not kept any more.";

byId("copy").addEventListener("click", async () => {
  // Browsers let pages copy over TLS and on this machine alone.
  const isCopied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  byId("copied").textContent = `${isCopied ? "The link is copied" : "The link to send"}: ${location.href}`;
});

// ---- the best, as they are simulated ----
const simulating = byId("simulating");
if (simulating) {
  const job = simulating.dataset.job;
  const table = byId("finalists");
  let count = 0;
  // A cell is the first number that one of its places has, or words for what is so or not.
  const cell = (finalist, { paths, words }) => {
    const values = paths.map((path) => path.split(".").reduce((held, name) => held?.[name], finalist));
    if (words) return words[values[0] ? 1 : 0];
    return short(values.find(Boolean));
  };
  follow(`/v1/simulator/${spec.finalists.rpc}?job_id=${encodeURIComponent(job)}`, {
    take(finalist) {
      count += 1;
      table.hidden = false;
      const row = table.tBodies[0].insertRow();
      const name = row.appendChild(document.createElement("th"));
      name.scope = "row";
      name.textContent = finalist.name;
      for (const one of spec.finalists.cells) {
        const place = row.insertCell();
        place.textContent = cell(finalist, one);
        if (!one.words) place.className = "number";
      }
      row.insertCell().textContent = "when all are simulated";
      simulating.textContent = `${count} simulated; more may come.`;
    },
    done() {
      simulating.replaceChildren(count ? `${count} simulated. ` : "None was simulated: nothing meets this.");
      if (!count) return;
      const link = simulating.appendChild(document.createElement("a"));
      link.href = `${spec.finalists.address}/${encodeURIComponent(job)}`;
      link.textContent = spec.finalists.link;
    },
    lost() { simulating.textContent = "The server is away; the page goes on when it is back."; },
    failed(problem) { simulating.textContent = problem.detail; },
  });
}
