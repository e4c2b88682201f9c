// A browser lets no page that was opened from a folder start a worker, and the search of the site is one.
// There, and only there, a hidden frame does the same: nothing is loaded from another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.body.appendChild(document.createElement("iframe"));
      this.frame.hidden = true;
      const inner = this.frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source !== inner) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      this.frame.addEventListener("load", () => {
        const first = this.waiting || [];
        this.waiting = null;
        first.forEach((message) => this.postMessage(message));
      });
      inner.document.open();
      inner.document.write(
        `<script>postMessage = (message) => parent.postMessage(message, "*");` +
          `importScripts = (...urls) => urls.forEach((url) => document.write('<script src="' + url + '"><\\/script>'));` +
          `<\/script><script src="${url}"><\/script>`,
      );
      inner.document.close();
    }
    postMessage(message) {
      if (this.waiting) this.waiting.push(message);
      else {
        const inner = this.frame.contentWindow;
        inner.dispatchEvent(new inner.MessageEvent("message", { data: message }));
      }
    }
    terminate() {
      this.frame.remove();
    }
  };
}
