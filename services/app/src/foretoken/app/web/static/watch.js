// A job's page: progress as it comes, and the result's page when it is there.
import { follow, isFinal, stateWord } from "./events.js";

const say = (text) => { document.getElementById("message").textContent = text; };
const AWAY = "The server is away; the page goes on when it is back.";

// Anew, once there is somebody to answer: a page that cannot be loaded would look no further.
async function renew() {
  try {
    await fetch(location.href, { method: "GET" });
    location.reload();
  } catch {
    say(AWAY);
    setTimeout(renew, 1000);
  }
}

// How long it takes yet, by how far it came since this page looks on.
let start = null;
function left(ratio) {
  if (!start || ratio < start.ratio) start = { ratio, at: performance.now() };
  const done = ratio - start.ratio;
  if (done < 0.02 || ratio >= 1) return "";
  const seconds = ((performance.now() - start.at) / 1000) * ((1 - ratio) / done);
  return seconds < 60 ? `about ${Math.max(1, Math.round(seconds))} s left` : `about ${Math.round(seconds / 60)} min left`;
}

const watched = document.getElementById("watched");
const { service, job } = watched.dataset;
follow(`/v1/${service}/watch_job?job_id=${encodeURIComponent(job)}`, {
  take(state) {
    document.getElementById("progress").value = state.progress_ratio;
    say([state.message, left(state.progress_ratio)].filter(Boolean).join(", "));
    document.getElementById("state").textContent = stateWord(state.state);
    if (isFinal(state.state)) renew();
  },
  done: renew,
  lost() { say(AWAY); },
  failed(problem) { say(problem.detail); },
});
