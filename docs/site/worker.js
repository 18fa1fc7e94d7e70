// Browsers start no worker for a page that is read from its folder (file:). The search then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script>
        postMessage = data => frameElement.dispatchEvent(new MessageEvent("message", { data }));
        importScripts = () => {}; // stemmers of other languages
      </script><script src="${new URL(script, location)}"></script>`;
      this.frame.addEventListener("message", event => this.dispatchEvent(new MessageEvent("message", { data: event.data })));
      this.frame.addEventListener("load", () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach(data => this.postMessage(data));
      });
      document.documentElement.append(this.frame);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
