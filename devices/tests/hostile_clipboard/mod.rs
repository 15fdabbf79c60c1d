//! A hostile agent in the guest, at the port of the clipboard, while viewers copy texts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use host::clipboard::{Hub, MAX_TEXT_BYTES, Port};
use host::testutil::agent::{LINUX, WINDOWS};

/// Types of messages, and one that nobody knows.
const KINDS: [u32; 6] = [4, 6, 7, 8, 9, 99];
/// Numbers that messages begin with: types of texts, requests, capabilities.
const NUMBERS: [u32; 6] = [0, 1, 2, 0x60, 0x20, 0x660];

/// Returns how many texts arrived at viewers, and how many bytes at the guest.
pub(crate) fn run(bytes: impl Iterator<Item = u8>) -> [usize; 2] {
    let (hub, texts) = (Arc::<Hub>::default(), Arc::<AtomicUsize>::default());
    let count = texts.clone();
    hub.on_copied(Box::new(move |text| {
        assert!(text.len() <= 3 * MAX_TEXT_BYTES, "a text of {} bytes", text.len());
        count.fetch_add(1, Ordering::Relaxed);
    }));
    let port = hub.port().expect("the only port");
    restart(&port, WINDOWS);
    let mut read = 0;
    let mut bytes = bytes.fuse();
    while let Some(deed) = bytes.next() {
        let mut next = || bytes.next().unwrap_or(0);
        match deed % 16 {
            // Any bytes, and any chunk.
            0 => match next() {
                it @ 0..4 => port.write(&[it, next(), next()]),
                4..8 => port.write(&[1, 0, 0, 0, next(), next(), 0, 0]),
                8..12 => port.write(&[1, 0, 0, 0, next(), next(), next(), next()]),
                it => restart(&port, if it % 2 == 0 { LINUX } else { WINDOWS }),
            },
            1..=6 => hub.offer(&"text\n".repeat(next().into())),
            7..=9 => read += port.read(&mut vec![0; usize::from(next()) * 16]),
            // A message, whose size may be wrong.
            _ => {
                let kind = KINDS[usize::from(next()) % KINDS.len()];
                let count = usize::from(next()) % 4;
                let body: Vec<_> =
                    (0..count).map(|_| NUMBERS[usize::from(next()) % NUMBERS.len()]).collect();
                let lie = if next() < 4 { u32::from(next()) << (next() % 25) } else { 0 };
                write(&port, kind, &body, lie);
            }
        }
    }
    [texts.load(Ordering::Relaxed), read]
}

/// Ends the agent, and starts another one.
fn restart(port: &Port, capabilities: u32) {
    port.set_open(false);
    port.set_open(true);
    write(port, 6, &[1, capabilities], 0);
}

fn write(port: &Port, kind: u32, body: &[u32], lie: u32) {
    let size = u32::try_from(4 * body.len()).expect("a few numbers");
    let header = [1, kind, 0, 0, size.wrapping_add(lie)];
    let message = header.iter().chain(body).flat_map(|it| it.to_le_bytes()).collect::<Vec<_>>();
    port.write(&[1, size + 20].map(u32::to_le_bytes).concat());
    port.write(&message);
}
