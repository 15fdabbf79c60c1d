//! TLS from files, which may be replaced at any time: certificates do not live long.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio_rustls::TlsAcceptor;

use crate::rfb::tls;

/// The files are looked at as often as that, and only when somebody comes.
const LOOK: Duration = Duration::from_secs(1);

/// What tells a file from the one that was there before: device, number, size and time.
type Stamp = Option<(u64, u64, u64, i64, i64)>;

/// A certificate and its key.
pub(super) struct Files {
    cert: PathBuf,
    key: PathBuf,
    now: Mutex<Now>,
}

struct Now {
    acceptor: TlsAcceptor,
    stamps: [Stamp; 2],
    looked: Instant,
}

impl Files {
    /// Reads both, if there are any.
    pub(super) fn new(
        cert: Option<&PathBuf>,
        key: Option<&PathBuf>,
    ) -> anyhow::Result<Option<Self>> {
        let stamps = [stamp(cert), stamp(key)];
        let acceptor = tls::pair(cert, key)?;
        let (Some(acceptor), Some(cert), Some(key)) = (acceptor, cert, key) else {
            return Ok(None);
        };
        let now = Mutex::new(Now { acceptor, stamps, looked: Instant::now() });
        Ok(Some(Self { cert: cert.clone(), key: key.clone(), now }))
    }

    /// As the files are now. While they are no pair, perhaps because only one of them has been
    /// replaced so far, the last good one stays.
    pub(super) fn acceptor(&self) -> TlsAcceptor {
        let mut now = self.now.lock().expect("no look panicked");
        if now.looked.elapsed() >= LOOK {
            self.look(&mut now);
        }
        now.acceptor.clone()
    }

    fn look(&self, now: &mut Now) {
        now.looked = Instant::now();
        let stamps = [stamp(Some(&self.cert)), stamp(Some(&self.key))];
        if stamps == now.stamps {
            return;
        }
        now.stamps = stamps;
        match tls::load(&self.cert, &self.key) {
            Ok(acceptor) => {
                now.acceptor = acceptor;
                tracing::info!("web: {} was read again", self.cert.display());
            }
            Err(error) => tracing::warn!("web: the old certificate stays: {error:#}"),
        }
    }
}

fn stamp(path: Option<&PathBuf>) -> Stamp {
    let meta = fs::metadata(path?).ok()?;
    Some((meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec()))
}
