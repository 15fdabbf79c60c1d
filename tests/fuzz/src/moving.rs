//! A pod that waits for the machine of another one: files of the volume, and strangers at its port.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use container::migration::tls::Key;
use container::migration::{Place, RUNNING, Running, WAITING, Waiting};
use host::testutil::noise::Noise;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio::runtime::{Builder, Runtime};
use tokio_rustls::rustls::pki_types::ServerName;

/// The size of the pipe to the pod.
const PIPE: usize = 1 << 17;

struct Pods {
    runtime: Runtime,
    keys: [Key; 2],
    /// The first message of the pod that may connect.
    hello: Vec<u8>,
}

static PODS: LazyLock<Pods> = LazyLock::new(|| {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let keys = [(); 2].map(|()| Key::make().expect("a key"));
    let expects = keys[1].public();
    let connector = keys[0].connector(Box::new(move || Ok(expects.clone()))).expect("TLS");
    let hello = runtime.block_on(async {
        let (client, mut pod) = duplex(PIPE);
        let name = ServerName::try_from("pod").expect("a name");
        let connects = connector.connect(name, client);
        let mut hello = vec![0; PIPE];
        tokio::select! {
            count = pod.read(&mut hello) => hello.truncate(count.expect("a message")),
            _ = connects => unreachable!("nobody answers"),
        }
        hello
    });
    Pods { runtime, keys, hello }
});

pub(crate) fn run(folder: &Path, data: &[u8]) {
    let pods = &*PODS;
    let place = Waiting::new(pods.keys[1].public(), Vec::new(), 1);
    let place = Place::take(folder, &place).expect("a place").expect("a free place");
    for name in [RUNNING, WAITING] {
        fs::write(folder.join(name), data).expect("a file");
    }
    Running::read(folder).ok();
    if let Ok(found) = Waiting::find(folder) {
        let found = found.expect("its lock is taken");
        assert!(found.addresses.len() <= 16, "{} addresses", found.addresses.len());
    }
    place.leave(folder);
    let allowed = pods.keys[0].public();
    let acceptor = pods.keys[1].acceptor(Box::new(move || Ok(allowed.clone()))).expect("TLS");
    pods.runtime.block_on(async {
        let (mut stranger, pod) = duplex(PIPE);
        stranger.write_all(data.get(..PIPE).unwrap_or(data)).await.expect("a free pipe");
        stranger.shutdown().await.expect("an open pipe");
        assert!(acceptor.accept(pod).await.is_err(), "a stranger is let in");
    });
}

pub(crate) fn make(noise: &mut Noise) -> Vec<u8> {
    let pods = &*PODS;
    let mut data = match noise.below(3) {
        0 => pods.hello.clone(),
        1 => {
            let address = noise.choose(&["\"10.0.0.1\"", "\"::1\"", "\"x\"", "7", "null"]);
            let addresses = vec![address; noise.choose(&[0, 1, 16, 17, 300])].join(",");
            let port = noise.choose(&["1", "65535", "65536", "-1", "\"\""]);
            let format = noise.choose(&["1", "2", "4294967296"]);
            let key = pods.keys[0].public();
            format!(
                "{{\"format\":{format},\"key\":\"{key:?}\",\"addresses\":[{addresses}],\
                 \"port\":{port},\"processors\":{port},\"memory\":{port}}}"
            )
            .into_bytes()
        }
        _ => (0..noise.below(600)).map(|_| noise.choose(&[0, 1, 3, 0x16, 0x2d, 0xff])).collect(),
    };
    for _ in 0..noise.below(4) {
        if !data.is_empty() {
            let at = usize::try_from(noise.below(data.len() as u64)).expect("a length");
            data[at] ^= noise.choose(&[1, 2, 0x40, 0x80]);
        }
    }
    data
}
