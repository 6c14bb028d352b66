// Live content: when a topic of this page has changed, its content is fetched again and merged; the words for the state of
// the connection (live, behind, lost, loaded), and after how long it is behind.
const TICK_S = 5;

export function startLive(onContent) {
  const content = document.getElementById("content");
  const state = document.getElementById("connection");
  if (!content || !state) return;
  let source = null, heardAt = Date.now(), lostAt = null, fetching = false, again = false;

  function show(name, words) {
    if (state.dataset.state !== name) state.dataset.state = name;
    if (state.textContent !== words) state.textContent = words;
  }

  async function refresh() {
    if (fetching) { again = true; return; }
    fetching = true;
    try {
      // The address bar, because filters change it.
      await htmx.ajax("GET", location.pathname + location.search, { target: "#content", swap: "innerMorph" });
      onContent();
      if (!content.dataset.topics) show("loaded", `loaded ${new Date().toISOString().slice(11, 19)} UTC`);
    } finally {
      fetching = false;
      if (again) { again = false; refresh(); }
    }
  }

  function heard() { heardAt = Date.now(); lostAt = null; }

  function connect() {
    if (source || !content.dataset.topics) return;
    source = new EventSource(`/live?topics=${encodeURIComponent(content.dataset.topics)}`);
    source.addEventListener("tick", heard);
    source.addEventListener("change", () => { heard(); refresh(); });
    source.addEventListener("error", () => {
      lostAt ??= new Date();
      if (source.readyState === EventSource.CLOSED) { source = null; setTimeout(connect, 3000); }
    });
  }

  function disconnect() { source?.close(); source = null; }

  function update() {
    if (lostAt) return show("lost", `not connected since ${lostAt.toTimeString().slice(0, 5)}`);
    const behind = Math.round((Date.now() - heardAt) / 1000);
    return behind > 2 * TICK_S ? show("behind", `${behind} s behind`) : show("live", "live");
  }

  // A hidden tab costs the server nothing, and catches up when it is shown.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return disconnect();
    heardAt = Date.now();
    connect();
    return refresh();
  });
  addEventListener("pagehide", disconnect);
  const every = Number(content.dataset.every);
  if (every > 0) setInterval(() => { if (!document.hidden) refresh(); }, every * 1000);
  document.addEventListener("htmx:after:swap", onContent);
  if (!content.dataset.topics) return;
  connect();
  update();
  setInterval(update, 1000);
}
