// A job's page: progress as it comes, and the result's page when it is there.
import { follow, isFinal, stateWord } from "./events.js";

const watched = document.getElementById("watched");
const { service, job } = watched.dataset;
follow(`/v1/${service}/watch_job?job_id=${encodeURIComponent(job)}`, {
  take(state) {
    document.getElementById("progress").value = state.progress_ratio;
    document.getElementById("message").textContent = state.message;
    document.getElementById("state").textContent = stateWord(state.state);
    if (isFinal(state.state)) location.reload();
  },
  done() { location.reload(); },
  lost() { document.getElementById("message").textContent = "The server is away; the page goes on when it is back."; },
  failed(problem) { document.getElementById("message").textContent = problem.detail; },
});
