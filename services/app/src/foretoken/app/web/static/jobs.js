// The list of jobs, anew every few seconds; while the server is away it stays and says so.
const body = document.getElementById("jobs");
const live = document.getElementById("live");
const EVERY_MS = 2000;

function cell(row, text, kind = "td") {
  const one = row.appendChild(document.createElement(kind));
  one.textContent = text;
  return one;
}

function show(jobs) {
  const rows = jobs.map((job) => {
    const row = document.createElement("tr");
    const name = row.appendChild(document.createElement("th"));
    name.scope = "row";
    const link = name.appendChild(document.createElement("a"));
    link.href = job.address;
    link.textContent = job.job_id;
    for (const text of [job.title, job.state]) cell(row, text);
    cell(row, `${Math.round(100 * job.progress_ratio)} %`).className = "number";
    cell(row, job.error_message || job.message);
    cell(row, job.created_at.slice(0, 19).replace("T", " ")).className = "when";
    cell(row, job.service);
    const next = cell(row, "");
    for (const act of [job.can_cancel && "cancel", job.can_resume && "resume"].filter(Boolean)) {
      const form = next.appendChild(document.createElement("form"));
      Object.assign(form, { method: "post", action: `${job.address}/${act}` });
      const button = form.appendChild(document.createElement("button"));
      button.className = "quiet";
      button.textContent = act[0].toUpperCase() + act.slice(1);
      button.setAttribute("aria-label", `${button.textContent} ${job.job_id}`);
    }
    return row;
  });
  const focused = ["href", "aria-label"].map((name) => [name, document.activeElement?.getAttribute?.(name)]).find(([, value]) => value);
  body.replaceChildren(...rows);
  if (focused) body.querySelector(`[${focused[0]}="${CSS.escape(focused[1])}"]`)?.focus();
  body.closest("table").hidden = !jobs.length;
  const empty = document.getElementById("empty");
  if (empty) empty.hidden = jobs.length > 0;
}

async function turn() {
  try {
    const answer = await fetch("/jobs/list");
    if (answer.ok) { show(await answer.json()); live.textContent = "Newest first; the table follows by itself."; }
  } catch {
    live.textContent = "The server is away; the table goes on when it is back.";
  }
  setTimeout(turn, document.hidden ? 5 * EVERY_MS : EVERY_MS);
}
setTimeout(turn, EVERY_MS);
