//! Browsers and guests that send any bytes to the gateway of the remote desktop.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use container::desktop::{Divider, Gateway, InfoFilter, RDP};
use container::pod::network::GuestAddress;
use screen::web::stage::Viewer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

/// A request of RDCleanPath whose packet asks for TLS.
pub(crate) const REQUEST: &[u8] = b"\x30\x2c\xa0\x04\x02\x02\x0d\x3e\xa2\x04\x0c\x02\x6d\x3a\xa3\
    \x03\x0c\x01\x74\xa6\x15\x04\x13\x03\0\0\x13\x0e\xe0\0\0\0\0\0\x01\0\x08\0\x03\0\0\0";
/// The time within which a connection must end.
const END: Duration = Duration::from_secs(60);
const GUEST: Ipv4Addr = Ipv4Addr::new(127, 0, 77, 1);

struct Bench {
    runtime: Runtime,
    gateway: Arc<Gateway>,
    /// The bytes that the guest sends next.
    guest_says: Arc<Mutex<Vec<u8>>>,
}

impl Bench {
    fn new() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let guest_says = Arc::<Mutex<Vec<u8>>>::default();
        let says = guest_says.clone();
        let listener = runtime.block_on(TcpListener::bind((GUEST, RDP))).expect("a port");
        runtime.spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let bytes = says.lock().expect("no test panicked").clone();
                // The gateway may close the connection at any time.
                stream.write_all(&bytes).await.ok();
            }
        });
        let guest = Arc::new(OnceLock::from(GuestAddress::Fixed(GUEST.into())));
        Self { runtime, gateway: Arc::new(Gateway::new(guest)), guest_says }
    }
}

/// Sends bytes as one of three, which the first byte chooses: a browser, a guest, and the client of
/// a connection. Returns the answer to the browser, or the client's bytes after the filter.
pub(crate) fn send(bytes: &[u8]) -> Vec<u8> {
    static BENCH: OnceLock<Bench> = OnceLock::new();
    let (first, bytes) = bytes.split_first().unwrap_or((&0, &[]));
    if first % 4 > 1 {
        divide(bytes);
        return filter(bytes);
    }
    let bench = BENCH.get_or_init(Bench::new);
    let (browser, guest) = if first % 4 == 0 { (bytes, &[][..]) } else { (REQUEST, bytes) };
    *bench.guest_says.lock().expect("no test panicked") = guest.to_vec();
    bench.runtime.block_on(async {
        let (mut ours, theirs) = duplex(1 << 16);
        let viewer = Viewer { stream: Box::new(theirs), peer: "fuzzer".into(), view_only: false };
        let served = tokio::spawn(bench.gateway.clone().serve(viewer));
        let mut said = Vec::new();
        let talk = async {
            // The gateway may close the connection at any time.
            ours.write_all(browser).await.ok();
            ours.shutdown().await.ok();
            ours.read_to_end(&mut said).await.ok();
            served.await.expect("the gateway does not panic");
        };
        timeout(END, talk).await.expect("the connection ends");
        said
    })
}

/// No byte is left out.
fn divide(bytes: &[u8]) {
    let (mut divider, mut left) = (Divider::default(), bytes);
    while !left.is_empty() {
        let count = divider.next(left);
        assert!((1..=left.len()).contains(&count), "{count} of {}", left.len());
        left = &left[count..];
    }
}

/// Pieces of any size give the same bytes.
fn filter(bytes: &[u8]) -> Vec<u8> {
    let mut whole = bytes.to_vec();
    InfoFilter::default().pass(&mut whole);
    let piece = 1 + usize::from(bytes.first().copied().unwrap_or(0) % 16);
    let mut pieces = bytes.to_vec();
    let mut filter = InfoFilter::default();
    pieces.chunks_mut(piece).for_each(|piece| filter.pass(piece));
    assert_eq!(whole, pieces, "in pieces of {piece}");
    let changed = whole.iter().zip(bytes).filter(|(one, other)| one != other).count();
    assert!(changed <= 4, "{changed} bytes changed");
    whole
}
