//! A client of the HTTP interfaces that Cloud Hypervisor and Firecracker offer at a Unix socket.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Asks a program that may not listen yet. The answer is null if it has no content.
pub fn ask(socket: &Path, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
    let mut stream = BufReader::new(connect(socket)?);
    let body = body.map(Value::to_string).unwrap_or_default();
    let kind = if body.is_empty() { "" } else { "Content-Type: application/json\r\n" };
    let length = body.len();
    let text =
        format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n");
    let text = format!("{text}{kind}Content-Length: {length}\r\n\r\n{body}");
    stream.get_mut().write_all(text.as_bytes())?;
    let mut status = String::new();
    stream.read_line(&mut status)?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        ensure!(stream.read_line(&mut line)? > 0, "{method} {path}: {status}: a short answer");
        let (name, value) = line.trim_end().split_once(':').unwrap_or_default();
        match name {
            "" => break,
            name if name.eq_ignore_ascii_case("content-length") => length = value.trim().parse()?,
            _ => {}
        }
    }
    let mut content = vec![0; length];
    stream.read_exact(&mut content)?;
    let content = String::from_utf8_lossy(&content);
    let is_good = status.split(' ').nth(1).is_some_and(|code| code.starts_with('2'));
    ensure!(is_good, "{method} {path}: {} {content}", status.trim_end());
    if content.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_str(&content).with_context(|| format!("{method} {path}: {content}"))
}

/// Connects to a program that may not listen yet.
pub(crate) fn connect(socket: &Path) -> Result<UnixStream> {
    let start = Instant::now();
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => {
                stream.set_read_timeout(Some(PATIENCE))?;
                return Ok(stream);
            }
            Err(error) => {
                let starts = [ErrorKind::NotFound, ErrorKind::ConnectionRefused];
                let may_come = starts.contains(&error.kind()) && start.elapsed() < PATIENCE;
                ensure!(may_come, "{}: {error}", socket.display());
                sleep(POLL_INTERVAL);
            }
        }
    }
}

#[cfg(test)]
mod test {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use serde_json::json;

    use super::*;

    #[test]
    fn an_answer_is_its_content_or_an_error_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let path = socket.clone();
        let server = thread::spawn(move || {
            let listener = UnixListener::bind(path).unwrap();
            [
                "200 OK\r\nContent-Length: 9\r\n\r\n{\"x\": 12}",
                "204 \r\n\r\n",
                "400 \r\nContent-length: 3\r\n\r\nbad",
            ]
            .map(|answer| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut asked = [0; 512];
                let length = stream.read(&mut asked).unwrap();
                write!(stream, "HTTP/1.1 {answer}").unwrap();
                String::from_utf8_lossy(&asked[..length]).into_owned()
            })
        });
        assert_eq!(ask(&socket, "GET", "/", None).unwrap(), json!({ "x": 12 }));
        let body = json!({ "state": "Paused" });
        assert_eq!(ask(&socket, "PATCH", "/vm", Some(&body)).unwrap(), Value::Null);
        let error = ask(&socket, "PUT", "/x", None).unwrap_err().to_string();
        assert_eq!(error, "PUT /x: HTTP/1.1 400 bad");
        let asked = server.join().unwrap();
        assert!(asked[1].starts_with("PATCH /vm HTTP/1.1\r\n"), "{asked:?}");
        assert!(
            asked[1].ends_with("Content-Length: 18\r\n\r\n{\"state\":\"Paused\"}"),
            "{asked:?}"
        );
    }
}
