//! The messages of QMP: greeting, requests, answers and events, as in QEMU's `qmp-spec`.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::{Map, Value, json};

/// The version of QEMU whose words these are.
pub const VERSION: [u32; 3] = [10, 0, 0];

/// A request that is carried out.
#[derive(Debug, PartialEq)]
pub struct Request {
    pub command: String,
    pub arguments: Map<String, Value>,
}

/// An error, as the answer shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    class: &'static str,
    #[serde(rename = "desc")]
    pub text: String,
}

impl Failure {
    pub fn generic(text: impl Into<String>) -> Self {
        Self { class: "GenericError", text: text.into() }
    }

    pub fn unknown(text: impl Into<String>) -> Self {
        Self { class: "CommandNotFound", text: text.into() }
    }

    pub fn no_device(name: &str) -> Self {
        Self { class: "DeviceNotFound", text: format!("Device '{name}' not found") }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::generic(format!("{error:#}"))
    }
}

/// Parses a request. Its id is returned even if the rest is wrong.
pub fn parse(bytes: &[u8]) -> (Option<Value>, Result<Request, Failure>) {
    let Ok(Value::Object(mut members)) = serde_json::from_slice(bytes) else {
        return (None, Err(Failure::generic("JSON parse error")));
    };
    let id = members.remove("id");
    (id, request(members))
}

fn request(mut members: Map<String, Value>) -> Result<Request, Failure> {
    let wrong = |what: &str| Err(Failure::generic(format!("QMP input {what}")));
    let command = match members.remove("execute") {
        Some(Value::String(command)) => command,
        Some(_) => return wrong("member 'execute' must be a string"),
        // `exec-oob` needs a capability that is not offered.
        None if members.contains_key("exec-oob") => {
            return wrong("member 'exec-oob' is unexpected");
        }
        None => return wrong("lacks member 'execute'"),
    };
    let arguments = match members.remove("arguments") {
        Some(Value::Object(arguments)) => arguments,
        Some(_) => return wrong("member 'arguments' must be an object"),
        None => Map::new(),
    };
    match members.keys().next() {
        Some(key) => wrong(&format!("member '{key}' is unexpected")),
        None => Ok(Request { command, arguments }),
    }
}

pub fn version() -> Value {
    let [major, minor, micro] = VERSION;
    let package = concat!("transom ", env!("CARGO_PKG_VERSION"));
    json!({ "qemu": { "major": major, "minor": minor, "micro": micro }, "package": package })
}

pub fn greeting() -> String {
    line(&json!({ "QMP": { "version": version(), "capabilities": [] } }))
}

pub fn answer(id: Option<Value>, result: Result<Value, Failure>) -> String {
    let mut answer = match result {
        Ok(value) => json!({ "return": value }),
        Err(failure) => json!({ "error": failure }),
    };
    if let Some(id) = id {
        answer["id"] = id;
    }
    line(&answer)
}

/// An event of this moment. `data` is null for events without data.
pub fn event(name: &str, data: Value) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let timestamp = json!({ "seconds": now.as_secs(), "microseconds": now.subsec_micros() });
    let mut event = json!({ "event": name, "timestamp": timestamp });
    if !data.is_null() {
        event["data"] = data;
    }
    line(&event)
}

fn line(value: &Value) -> String {
    format!("{value}\r\n")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn wrong_requests_are_answered_with_their_id() {
        for (text, id, reason) in [
            (r#"{"id": 1}"#, json!(1), "QMP input lacks member 'execute'"),
            (r#"{"id": {"a": 2}, "execute": 7}"#, json!({"a": 2}), "'execute' must be a string"),
            (r#"{"id": "x", "execute": "a", "arguments": []}"#, json!("x"), "must be an object"),
            (r#"{"id": null, "execute": "a", "b": 1}"#, Value::Null, "'b' is unexpected"),
            (r#"{"id": 1, "exec-oob": "a"}"#, json!(1), "'exec-oob' is unexpected"),
        ] {
            let (found, request) = parse(text.as_bytes());
            let failure = request.unwrap_err();
            assert_eq!(found.as_ref(), Some(&id), "{text}");
            assert!(failure.text.contains(reason), "{failure:?}");
            let answer: Value = serde_json::from_str(&answer(found, Err(failure))).unwrap();
            assert_eq!((&answer["id"], &answer["error"]["class"]), (&id, &json!("GenericError")));
        }
        assert!(parse(b"{execute: 1}").1.is_err());
        let (id, request) = parse(br#"{"execute": "a", "arguments": {"b": 1}}"#);
        assert_eq!((id, request.unwrap().arguments["b"].as_u64()), (None, Some(1)));
    }

    #[test]
    fn events_without_data_have_no_such_member() {
        let read = |text: String| serde_json::from_str::<Value>(&text).unwrap();
        assert!(read(event("STOP", Value::Null)).get("data").is_none());
        let reset = read(event("RESET", json!({ "guest": true })));
        assert_eq!(reset["data"]["guest"], true);
        assert!(reset["timestamp"]["seconds"].as_u64() > Some(1_000_000_000));
    }
}
