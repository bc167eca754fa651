// Browsers start no worker for a page of a folder (file:), so the site's search runs in a hidden
// frame there. The name tells mkdocs-material's plugin `offline` not to fetch a shim from a host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = (...urls) => Promise.all(urls.map(one => this.load(one)))
      this.loaded = this.load(url)
    }

    load(url) {
      const script = this.inside.document.createElement("script")
      script.src = new URL(url, location.href).href
      return new Promise((done, failed) => {
        script.onload = done
        script.onerror = failed
        this.inside.document.body.appendChild(script)
      })
    }

    postMessage(data) {
      const event = new this.inside.MessageEvent("message", { data })
      this.loaded.then(() => this.inside.dispatchEvent(event))
    }
  }
}
