//! Clients of QEMU's control protocols that send any bytes, without a machine.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use container::qmp::{Monitors, Rights, Server};
use container::settings::translate::monitor::Protocol;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex, split};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

/// The time within which a connection must end.
const END: Duration = Duration::from_secs(60);

struct Bench {
    runtime: Runtime,
    monitors: Arc<Monitors>,
}

/// The answers to a client, and the number of its requests that were answered. The first byte
/// chooses the protocol and the rights.
pub(crate) fn talk(bytes: &[u8]) -> String {
    static BENCH: OnceLock<Bench> = OnceLock::new();
    let bench = BENCH.get_or_init(|| Bench {
        runtime: Builder::new_current_thread().enable_all().build().expect("a runtime"),
        monitors: Monitors::new(Path::new("/nonexistent/vmm.sock").into(), "box".into(), &[]),
    });
    let (first, bytes) = bytes.split_first().unwrap_or((&0, &[]));
    let protocol = if first & 1 == 0 { Protocol::Qmp } else { Protocol::Human };
    let rights = if first & 2 == 0 { Rights::All } else { Rights::Harmless };
    let talk = async {
        let monitors = bench.monitors.clone();
        let server = Server { protocol, rights, pause: Duration::ZERO, monitors };
        let (ours, theirs) = duplex(4096);
        let (mut read, mut write) = split(ours);
        let send = async {
            // The other side may disconnect first.
            write.write_all(bytes).await.ok();
            write.shutdown().await.ok();
        };
        let mut said = Vec::new();
        let (served, (), read) =
            tokio::join!(async { server.serve(theirs).await }, send, read.read_to_end(&mut said));
        read.expect("a pipe");
        drop(served);
        String::from_utf8(said).expect("text")
    };
    let said = bench.runtime.block_on(async { timeout(END, talk).await.expect("an end") });
    if protocol == Protocol::Qmp {
        for line in said.lines() {
            let answer: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
            let kinds = ["QMP", "return", "error", "event"];
            assert_eq!(kinds.iter().filter(|it| answer.get(it).is_some()).count(), 1, "{line}");
        }
    }
    said
}
