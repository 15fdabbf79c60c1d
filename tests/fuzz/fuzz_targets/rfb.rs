//! A client of the screen: any bytes, before and after it is in.
#![no_main]

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use devices::input::Hub;
use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex, split};
use tokio::runtime::{Builder, Runtime};
use vmm::rfb::canvas::Canvas;
use vmm::rfb::keys::Us;
use vmm::rfb::security::{Door, Passwords};
use vmm::rfb::{Admission, Entry, Outside, Rules, Server};

fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| Builder::new_current_thread().enable_all().build().expect("a runtime"))
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, rest)) = data.split_first() else { return };
    let entry = match kind % 3 {
        0 => Entry::Ask(Door::Local),
        kind => Entry::Open { view_only: kind == 1 },
    };
    let passwords = Passwords { full: Some("secret".into()), ..Passwords::default() };
    let rules = Rules { passwords, ..Rules::default() };
    let hub = Arc::<Hub>::default();
    let canvas = Canvas::new(None, hub.clone());
    let outside = Outside { hub, layout: Arc::new(Us), clipboard: None, power: Box::new(|_| ()) };
    let server = Server::new(canvas, rules, outside);
    runtime().block_on(async {
        let (near, far) = duplex(64 << 10);
        let admission = Admission { peer: "fuzz".into(), entry };
        let serve = server.clone().serve(Box::new(far), admission);
        let (mut reader, mut writer) = split(near);
        let talk = async {
            if entry_is_open(entry) {
                writer.write_all(b"RFB 003.008\n\x01\x01").await.ok();
            }
            writer.write_all(rest).await.ok();
            writer.shutdown().await.ok();
        };
        let hear = async {
            let mut drain = [0; 4096];
            while reader.read(&mut drain).await.is_ok_and(|count| count > 0) {}
        };
        let all = async { tokio::join!(serve, talk, hear) };
        // The end of what is said ends the session: one that goes on hangs.
        tokio::time::timeout(Duration::from_secs(5), all).await.expect("the session ends");
    });
    assert!(server.status().is_empty(), "nobody is left");
});

fn entry_is_open(entry: Entry) -> bool {
    matches!(entry, Entry::Open { .. })
}
