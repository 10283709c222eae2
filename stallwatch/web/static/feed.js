// Keeps a page fed: events from `/api/v1/events`, and what was before them, again after each reconnect.

const SILENCE = 5000; // milliseconds without an event after which the stream is given up
const AGAIN = [500, 1000, 2000, 5000]; // milliseconds until it is tried again

/** Where a path of ours is; a user and a password in the page's own address must not be in it. */
function address(path) {
  return new URL(path, location.origin + location.pathname).href;
}

/**
 * Calls `begin({ timeline, stalls })` with what there was and then `event(content)` every second; `state` hears
 * "connecting", "live" and "lost". Nothing is asked for while nobody looks. Returns how to begin anew.
 */
export function feed({ begin, event, state }) {
  let source = null, watchdog = 0, retry = 0, tries = 0, waiting = null;

  function stop() {
    clearTimeout(watchdog);
    clearTimeout(retry);
    source?.close();
    source = null;
  }

  /** A stream that ended is tried again before anybody is alarmed: each ends after an hour. */
  function lost(ended) {
    stop();
    state(ended && tries === 0 ? "connecting" : "lost");
    retry = setTimeout(start, AGAIN[Math.min(tries, AGAIN.length - 1)]);
    tries += 1;
  }

  function start() {
    stop();
    if (document.hidden) return;
    if (tries === 0) state("connecting");
    const mine = new EventSource(address("api/v1/events"));
    source = mine;
    waiting = []; // events that came before what was before them
    watchdog = setTimeout(lost, SILENCE, false);
    mine.onopen = () => before(mine);
    mine.onerror = () => mine === source && lost(true);
    mine.onmessage = (message) => {
      if (mine !== source) return;
      clearTimeout(watchdog);
      watchdog = setTimeout(lost, SILENCE, false);
      const content = JSON.parse(message.data);
      if (waiting) waiting.push(content);
      else event(content);
    };
  }

  async function before(mine) {
    try {
      const answers = await Promise.all(["api/v1/timeline?seconds=900", "api/v1/stalls"].map((path) => fetch(address(path))));
      if (answers.some((answer) => !answer.ok)) throw new Error("refused");
      const [timeline, stalls] = await Promise.all(answers.map((answer) => answer.json()));
      if (mine !== source) return;
      begin({ timeline, stalls: stalls.stalls });
      tries = 0;
      state("live");
      const late = waiting;
      waiting = null;
      late.forEach(event);
    } catch {
      if (mine === source) lost(false);
    }
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  addEventListener("online", start);
  start();
  return start;
}
