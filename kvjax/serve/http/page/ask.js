// The server: requests, streams, errors. Nothing here touches the page.

export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.retryAfter = null;
  }
}

// Paths are below the page's own, which a proxy may have moved.
export async function ask(path, key, body, signal) {
  const headers = body === undefined ? {} : {"Content-Type": "application/json"};
  if (key) headers.Authorization = `Bearer ${key}`;
  const method = body === undefined ? "GET" : "POST";
  const answer = await fetch(path.slice(1), {method, headers, body: body && JSON.stringify(body), signal});
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, said.error);
  }
  return answer;
}

// The events of a stream, one object each.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith(":")) continue; // a comment keeps the connection open
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(200, event.error);
      yield event;
    }
  }
}
