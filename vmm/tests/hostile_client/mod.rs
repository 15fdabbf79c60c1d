//! A client of the control socket that sends arbitrary bytes, and a machine that answers with the
//! request.

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};

use host::listen::UnixAddress;
use serde_json::{Value, json};
use tempfile::TempDir;
use vmm::control::{Command, Request, Server};

/// The machine. It ends when its socket is dropped.
pub(crate) struct Machine {
    path: PathBuf,
    _server: Server,
    _folder: TempDir,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control");
        let (sender, requests) = mpsc::channel::<Request>();
        let submit = Arc::new(move |request| sender.send(request).is_ok());
        let bound = UnixAddress::Path(path.clone()).listen().expect("the folder is new");
        let server = Server::new(bound, submit).expect("a thread");
        std::thread::spawn(move || {
            while let Ok(request) = requests.recv() {
                let command = json!(request.command);
                request.answer(Ok(command));
            }
        });
        Self { path, _server: server, _folder: folder }
    }

    /// Sends these bytes. Checks that each line gets an answer, up to the first that is not text.
    pub(crate) fn serve(&self, bytes: &[u8]) {
        let client = UnixStream::connect(&self.path).expect("it listens");
        let mut sender = client.try_clone().expect("a socket");
        let mut answers = 0;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                // The server disconnects a client that sends a line that is not text.
                sender.write_all(bytes).ok();
                sender.shutdown(Shutdown::Write).ok();
            });
            for line in BufReader::new(client).lines() {
                // The same: unread input resets the connection.
                let Ok(line) = line else { break };
                check(&line);
                answers += 1;
            }
        });
        let lines = bytes.split_inclusive(|byte| *byte == b'\n');
        let texts = lines.take_while(|line| std::str::from_utf8(line).is_ok());
        // A line that is too long counts as several.
        assert!(answers >= texts.count() || bytes.len() > 64 << 10, "{answers} answers");
    }
}

/// Checks an answer: the request as understood, which can be parsed again, or an error message.
fn check(line: &str) {
    let answer: Value = serde_json::from_str(line).expect("JSON");
    match (answer.get("ok"), answer.get("error").and_then(Value::as_str)) {
        (Some(asked), None) => {
            let command: Command = serde_json::from_value(asked.clone()).expect("a command");
            assert_eq!(json!(command), *asked);
        }
        (None, Some(sentence)) => assert!(!sentence.is_empty()),
        _ => panic!("neither an answer nor an error: {line}"),
    }
}

/// Parses a command as typed after `vmm ctl`. A command that parses must survive serialization.
pub(crate) fn typed(text: &str) {
    let words: Vec<_> = text.split(' ').map(str::to_owned).collect();
    match Command::read(&words) {
        Ok(command) => {
            let sent = serde_json::to_string(&command).expect("plain data");
            assert_eq!(serde_json::from_str::<Command>(&sent).expect("a command"), command);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
