// Browsers start no worker for a page of a folder (file://): the search's script runs in a frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = (source) =>
        new Promise((loaded, failed) => {
          const script = inner.document.createElement("script");
          [script.src, script.onload, script.onerror] = [source, loaded, failed];
          inner.document.head.append(script);
        });
      inner.importScripts = (...sources) => Promise.all(sources.map(load));
      this.ready = load(url);
    }

    // Messages that come before the script has been loaded wait for it.
    postMessage(data) {
      const inner = this.frame.contentWindow;
      this.ready.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
