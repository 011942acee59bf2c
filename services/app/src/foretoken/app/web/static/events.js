// Follows a stream of the API over lost connections and restarts, until it says that it is over.
// take(item) is called for each item, done() at the end, lost() when the server is away.
export function follow(address, { take, done, lost, failed }) {
  const source = new EventSource(address);
  source.addEventListener("item", (event) => take(JSON.parse(event.data)));
  source.addEventListener("end", () => { source.close(); done?.(); });
  source.addEventListener("problem", (event) => { source.close(); failed?.(JSON.parse(event.data)); });
  source.onerror = () => {
    lost?.();
    // A refusal ends it for the browser; the server may be starting.
    if (source.readyState === EventSource.CLOSED) setTimeout(() => follow(address, { take, done, lost, failed }), 2000);
  };
  addEventListener("pagehide", () => source.close());
}

export const stateWord = (state) => state.replace("JOB_STATE_", "").toLowerCase();
export const isFinal = (state) => ["succeeded", "failed", "cancelled"].includes(stateWord(state));
