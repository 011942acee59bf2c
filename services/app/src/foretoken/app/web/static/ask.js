// A form of a question: what is wrong stands next to its field while one fills it in.
const form = document.getElementById("question");
const WAIT_MS = 400;
let [waiting, turn] = [0, 0];

function tell(problems) {
  for (const hint of form.querySelectorAll("p.hint[id]")) {
    const name = hint.id.slice(2);
    const input = form.elements[name];
    const problem = problems[name];
    hint.querySelector("strong")?.remove();
    hint.closest(".field")?.classList.toggle("wrong", Boolean(problem));
    input?.removeAttribute?.("aria-invalid");
    if (!problem) continue;
    const said = document.createElement("strong");
    said.textContent = `${problem} `;
    hint.prepend(said);
    input?.setAttribute?.("aria-invalid", "true");
    hint.closest("details")?.setAttribute("open", "");
  }
  const shown = document.getElementById("wrong");
  const named = Object.keys(problems).filter((name) => name && document.getElementById(`h-${name}`));
  shown.textContent = named.length ? "" : problems[""] ?? "";
  shown.hidden = !shown.textContent;
}

async function check() {
  const mine = ++turn;
  const content = new FormData(form);
  // A trace is read when the question is asked.
  content.delete("trace");
  try {
    const answer = await fetch(form.dataset.check, { method: "POST", body: content });
    if (answer.ok && mine === turn) tell(await answer.json());
  } catch { /* The server is away: asking will say so. */ }
}

form.addEventListener("input", (event) => {
  if (event.target.type === "file") return;
  clearTimeout(waiting);
  waiting = setTimeout(check, WAIT_MS);
});

// The answer comes with the next page; what keeps it waiting is said on this one.
addEventListener("pageshow", () => { document.getElementById("asked").textContent = ""; });
form.addEventListener("submit", () => {
  document.getElementById("asked").textContent = "Answering. The first question of a model on a GPU learns its operators from the measurements, once: some seconds more.";
});

// A folder's files are read here, and texts are sent. NVIDIA's ModelOpt says in a file of its own how weights are stored.
const [CONFIG, STORED, INDEX, WEIGHTS] = ["config.json", "hf_quant_config.json", "model.safetensors.index.json", "model.safetensors"];
const LONGEST_HEADER = 1e8;

// What the tensors of a checkpoint take: an index says it, and the header of a single file.
async function bytesOf(files) {
  const [index, weights] = [INDEX, WEIGHTS].map((name) => files.find((one) => one.name === name));
  try {
    if (index) return Math.round(JSON.parse(await index.text()).metadata.total_size);
    const length = Number(new DataView(await weights.slice(0, 8).arrayBuffer()).getBigUint64(0, true));
    if (length > LONGEST_HEADER) return "";
    const { __metadata__, ...tensors } = JSON.parse(await weights.slice(8, 8 + length).text());
    return Object.values(tensors).reduce((sum, { data_offsets: [start, end] }) => sum + end - start, 0);
  } catch { return ""; }
}

async function take(files) {
  const stored = files.find((one) => one.name === STORED);
  const file = files.find((one) => one.name === CONFIG) ?? files.find((one) => one !== stored && one.name.endsWith(".json"));
  if (!file) return tell({ config: `there is no ${CONFIG} in this folder. Browsers do not see links in it, such as those of the Hugging Face cache: choose the file below.` });
  const texts = await Promise.all([file, stored].filter(Boolean).map((one) => one.text()));
  form.elements.config.value = texts.join("\n");
  held.value = await bytesOf(files);
  return check();
}

const held = form.elements["checkpoint-bytes"];
// What one writes is of no folder.
form.elements.config?.addEventListener("input", () => { held.value = ""; });
const chosen = document.getElementById("f-config-file");
chosen?.addEventListener("change", async () => {
  await take([...chosen.files]);
  chosen.value = "";
});

// Of a folder that is dropped only these files are opened, whatever its weights take.
async function filesOf(entry) {
  if (entry.isFile) return [await new Promise((done, failed) => entry.file(done, failed))];
  const [reader, found] = [entry.createReader(), []];
  for (let some = [null]; some.length;) {
    // A reader gives the next hundred, and none at the end.
    some = await new Promise((done, failed) => reader.readEntries(done, failed));
    found.push(...some.filter((one) => one.isFile && [CONFIG, STORED, INDEX, WEIGHTS].includes(one.name)));
  }
  return (await Promise.all(found.map(filesOf))).flat();
}

const place = chosen?.closest("details");
const hasFiles = (event) => event.dataTransfer.types.includes("Files");
place?.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
place?.addEventListener("drop", async (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  place.open = true;
  const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  await take((await Promise.all(entries.map(filesOf))).flat());
});
