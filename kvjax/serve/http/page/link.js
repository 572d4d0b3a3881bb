// What the form says as the part of an address behind "#", which browsers send to no server. Pure.

const FIELDS = ["prompt", "a", "b", "mode", "tokens", "temperature"];

export function written(form) {
  return new URLSearchParams(FIELDS.map((name) => [name, form[name]])).toString();
}

// Of the fields those that the link names.
export function read(fragment) {
  const found = new URLSearchParams(fragment.replace(/^#/, ""));
  return Object.fromEntries(FIELDS.filter((name) => found.has(name)).map((name) => [name, found.get(name)]));
}
