//! The output with `--json` fits `docs/command.schema.json`, and every field of the schema occurs.

use std::{cell::RefCell, collections::BTreeSet, fs, path::Path, process::Command};

use serde_json::{Value, json};

use super::command::{distlock, distlock_at, distlock_at_url, run_for_json};
use crate::{
    helpers::{manager, set_foreign_lock, spawn_queued_waiter},
    support::{Nodes, RedisServer},
};

/// The schema, and the properties that have occurred in checked documents.
pub(super) struct Schema {
    root: Value,
    seen: RefCell<BTreeSet<String>>,
}

/// The keywords that a reader needs, but which restrict nothing.
const ANNOTATIONS: [&str; 2] = ["description", "title"];

impl Schema {
    pub(super) fn read() -> Schema {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/command.schema.json");
        let root = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        Schema { root, seen: RefCell::default() }
    }

    /// Checks the output of a command against the definition with this name.
    #[track_caller]
    pub(super) fn check(&self, definition: &str, document: &Value) {
        assert_eq!(document["version"], 1, "{document:#}");
        let at = format!("#/$defs/{definition}");
        if let Err(why) = self.matches(&json!({ "$ref": at }), &at, document) {
            panic!("{why}\n{document:#}");
        }
        let whole = json!({ "anyOf": self.root["anyOf"] });
        if let Err(why) = self.matches(&whole, "#", document) {
            panic!("{why}\n{document:#}");
        }
    }

    /// Unlike JSON Schema, rejects fields and keywords that are not listed.
    fn matches(&self, schema: &Value, at: &str, value: &Value) -> Result<(), String> {
        let rules = schema.as_object().unwrap();
        for (keyword, rule) in rules {
            match keyword.as_str() {
                "$ref" => {
                    let target = rule.as_str().unwrap();
                    let schema = self.root.pointer(target.trim_start_matches('#'));
                    self.matches(schema.unwrap_or_else(|| panic!("no {target}")), target, value)?;
                }
                "anyOf" => {
                    let branches = rule.as_array().unwrap();
                    let failures: Vec<String> = branches
                        .iter()
                        .map_while(|branch| self.matches(branch, at, value).err())
                        .collect();
                    if failures.len() == branches.len() {
                        return Err(format!("{at}: none fits: {failures:?}"));
                    }
                }
                "type" => {
                    let found = type_of(value);
                    let allowed = rule.as_array().cloned().unwrap_or_else(|| vec![rule.clone()]);
                    let fits = allowed
                        .iter()
                        .any(|name| name == found || (name == "number" && found == "integer"));
                    if !fits {
                        return Err(format!("{at}: {found} instead of {rule}"));
                    }
                }
                "const" if rule != value => return Err(format!("{at}: {value} is not {rule}")),
                "enum" if !rule.as_array().unwrap().contains(value) => {
                    return Err(format!("{at}: {value} is none of {rule}"));
                }
                "minimum" if value.as_f64() < rule.as_f64() && !value.is_null() => {
                    return Err(format!("{at}: {value} is less than {rule}"));
                }
                "const" | "enum" | "minimum" => {}
                "required" => {
                    let names = rule.as_array().unwrap().iter().filter_map(Value::as_str);
                    if let Some(name) = names.into_iter().find(|name| value.get(name).is_none()) {
                        return Err(format!("{at}: {name} is missing"));
                    }
                }
                "properties" => {
                    for (name, part) in value.as_object().into_iter().flatten() {
                        let schema =
                            rule.get(name).ok_or_else(|| format!("{at}: unknown field {name}"))?;
                        self.matches(schema, &format!("{at}/properties/{name}"), part)?;
                    }
                    let names = rule.as_object().unwrap().keys();
                    let paths = names.map(|name| format!("{at}/properties/{name}"));
                    self.seen.borrow_mut().extend(paths);
                }
                "items" => {
                    for item in value.as_array().into_iter().flatten() {
                        self.matches(rule, &format!("{at}/items"), item)?;
                    }
                }
                keyword if ANNOTATIONS.contains(&keyword) => {}
                keyword => panic!("{at}: {keyword} is not known to this test"),
            }
        }
        Ok(())
    }

    /// The definitions of which no document had a part.
    fn unseen(&self) -> Vec<String> {
        let definitions = self.root["$defs"].as_object().unwrap();
        let seen = self.seen.borrow();
        definitions
            .iter()
            .filter(|(_, schema)| schema.get("properties").is_some())
            .map(|(name, _)| format!("#/$defs/{name}/"))
            .filter(|path| !seen.iter().any(|seen| seen.starts_with(path)))
            .collect()
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

#[test]
fn json_of_every_command_fits_the_schema() {
    let schema = Schema::read();
    let server = RedisServer::start();
    let check = |definition: &str, command: Command, code: i32| {
        let (value, ended) = run_for_json(command);
        assert_eq!(ended.code, Some(code), "{ended:?}");
        schema.check(definition, &value);
        value
    };
    check("ls", distlock_at(&server, &["ls", "--json"]), 0);
    check("show", distlock_at(&server, &["show", "x", "--json"]), 1);
    check("release", distlock_at(&server, &["release", "x", "--force", "--json"]), 1);

    let detached = check("acquired", distlock_at(&server, &["lock", "d", "--detach", "--json"]), 0);
    let [lock] = detached["locks"].as_array().unwrap().as_slice() else { panic!("{detached}") };
    assert!(lock["detached"].as_str().unwrap().ends_with(" d"), "{lock}");
    let held = check("error", distlock_at(&server, &["lock", "d", "-n", "-E", "9", "--json"]), 9);
    assert_eq!(held["error"]["kind"], "held");
    check("release", distlock_at(&server, &["release", "d", "--force", "--json"]), 0);

    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    assert!(set_foreign_lock(&server, "lock:foreign", "a stranger", 600_000));
    server.cli(&["SET", "lock:forever", "an operator"]);
    let reader = mgr.rw_lock("shared").unwrap().read().unwrap();
    let list = check("ls", distlock_at(&server, &["ls", "--json"]), 0);
    assert_eq!(list["locks"].as_array().unwrap().len(), 4);
    check("show", distlock_at(&server, &["show", "x", "--json"]), 0);
    check("show", distlock_at(&server, &["show", "foreign", "--json"]), 0);
    let other = ["release", "x", "--if-id", "another", "--json"];
    check("release", distlock_at(&server, &other), 1);
    check("release", distlock_at(&server, &["release", "foreign", "--force", "--json"]), 0);
    drop((guard, reader));
    drop(waiting.join().unwrap().unwrap());

    check("doctor", distlock_at(&server, &["doctor", "--json"]), 0);
    let bench = check("bench", distlock_at(&server, &["bench", "--json", "--time", "0.5"]), 0);
    assert_eq!(bench["rows"][0]["latency_ratio"], 1.0);

    let nodes = Nodes::start(3);
    for node in 0..2 {
        assert!(set_foreign_lock(nodes.server(node), "lock:x", "me", 600_000));
    }
    nodes.kill(2);
    let shown = check("show", distlock_at_url(&nodes.urls(), &["show", "x", "--json"]), 0);
    assert_eq!(shown["lock"]["nodes"].as_array().unwrap().len(), 3);
    check("doctor", distlock_at_url(&nodes.urls(), &["doctor", "--json"]), 1);
    assert_eq!(schema.unseen(), [""; 0]);
}

#[test]
fn failures_are_json_too() {
    let schema = Schema::read();
    let server = RedisServer::start();
    let url = server.url();
    server.kill();
    for (args, kind, code, message) in [
        (&["ls"][..], "unavailable", 69, "Connection refused"),
        (&["show", "x"], "unavailable", 69, "Connection refused"),
        (&["release", "x", "--force"], "unavailable", 69, "Connection refused"),
        (&["bench", "--time", "1"], "unavailable", 69, "cannot measure round trip"),
        (&["bench", "--time", "11m"], "usage", 64, "--time is 11m, but must be 100ms to 10m"),
        (&["doctor", "--ttl", "1ms"], "usage", 64, "--ttl is 1ms, but must be 10ms to 24h"),
        (&["ls", "["], "usage", 64, "no name can match"),
        (&["ls", "--nonsense"], "usage", 64, "unexpected argument '--nonsense' found"),
        (&["show"], "usage", 64, "required arguments were not provided: <NAME>"),
        (&["release", "x"], "usage", 64, "--force"),
        (&["ls", "--url", "redis://:pw@h"], "usage", 64, "put the URL into DISTLOCK_URL"),
        (&["ls", "--password-file", "/no/such/file"], "usage", 64, "/no/such/file"),
        (&["ls", "--timeout", "61"], "usage", 64, "--timeout is 61s, but must be 1ms to 60s"),
    ] {
        let mut command = distlock(args);
        command.arg("--json").env("DISTLOCK_URL", &url);
        let (value, ended) = run_for_json(command);
        schema.check("error", &value);
        let error = &value["error"];
        assert_eq!((&error["kind"], &error["exit_code"]), (&json!(kind), &json!(code)), "{args:?}");
        let text = error["message"].as_str().unwrap();
        assert!(text.contains(message) && !text.contains('\n'), "{args:?}: {text}");
        // People who read standard error see the reason too.
        assert_eq!((ended.code, ended.err.is_empty()), (Some(code), false), "{args:?}");
    }
    // The report says why, so there is no other document.
    let (value, ended) = run_for_json({
        let mut command = distlock(&["doctor", "--json"]);
        command.env("DISTLOCK_URL", &url);
        command
    });
    schema.check("doctor", &value);
    assert_eq!(ended.code, Some(69));
}

/// The test's own check, which is stricter than a usual validator.
#[test]
fn schema_rejects_other_documents() {
    let schema = Schema::read();
    let fits = |document: &Value| schema.matches(&json!({ "$ref": "#/$defs/show" }), "", document);
    fits(&json!({ "version": 1, "lock": null })).unwrap();
    for (document, why) in [
        (json!({ "version": 2, "lock": null }), "2 is not 1"),
        (json!({ "version": 1 }), "lock is missing"),
        (json!({ "version": 1, "lock": null, "more": 1 }), "unknown field more"),
        (json!({ "version": 1, "lock": 7 }), "integer instead of"),
        (json!([]), "version is missing"),
        (json!({ "version": 1, "lock": [] }), "array instead of"),
    ] {
        let found = fits(&document).unwrap_err();
        assert!(found.contains(why), "{found}");
    }
}
