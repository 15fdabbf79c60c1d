//! Requests to the pod: from programs and pages at the web port, and from commands at its socket.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Extension;
use container::agent::Agent;
use container::plan::Plan;
use container::pod::freeze::Freezer;
use container::pod::inquiry;
use container::pod::runtime_folder::RuntimeFolder;
use container::settings::environment::Environment;
use container::story::Story;
use container::web::{self, WebState};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use screen::web::gate::{Connection, Rules};
use screen::web::routes;
use screen::web::socket::Farewell;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex, split};
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

/// The time within which each connection must end.
const END: Duration = Duration::from_secs(60);
/// Answers are shorter.
const MAX_ANSWER: usize = 16 << 20;
/// The content of a file beside the volume.
const SECRET: &str = "outside-the-volume-7f2c";

/// A pod without a machine, with its files in a folder.
struct Pod {
    runtime: Runtime,
    web: Arc<WebState>,
    volume: String,
}

impl Pod {
    fn shared(folder: &Path) -> &'static Self {
        static POD: OnceLock<Pod> = OnceLock::new();
        POD.get_or_init(|| Self::new(folder))
    }

    fn new(folder: &Path) -> Self {
        let (volume, runtime_folder) = (folder.join("storage"), folder.join("room"));
        [&volume, &runtime_folder].iter().for_each(|it| fs::create_dir_all(it).expect("a folder"));
        fs::write(folder.join("secret"), SECRET).expect("a file");
        fs::write(volume.join("disk.img"), [0; 4096]).expect("a file");
        symlink(folder.join("secret"), volume.join("link")).expect("a link");
        let variables = [("VERSION", "probe"), ("STORAGE", volume.to_str().expect("text"))];
        let variables: Environment =
            variables.into_iter().map(|(name, text)| (name.into(), text.into())).collect();
        let plan = Plan::make(&variables, Path::new("/")).expect("a plan");
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let runtime_folder = RuntimeFolder::within(&runtime_folder);
        let (story, agent) = (Story::new(), Arc::new(Agent::new(runtime_folder.agent())));
        let freezer_agent = agent.clone();
        let web = WebState::new(story, runtime_folder.clone(), &plan, Arc::default(), agent);
        let web = Arc::new(web);
        let freezer = Freezer::new(runtime_folder.control(), freezer_agent, false);
        let end_notice = inquiry::EndNotice::default();
        let parts =
            inquiry::Parts { web: web.clone(), end_notice, freezer, departure: Arc::default() };
        let serve = runtime.block_on(async { inquiry::open(&runtime_folder.pod(), parts) });
        runtime.spawn(serve.expect("a socket"));
        let volume = volume.display().to_string();
        Self { runtime, web, volume }
    }

    /// Replaces `VOLUME` with the path of the volume.
    fn bytes(&self, bytes: &[u8]) -> Vec<u8> {
        let mut text = Vec::new();
        let mut rest = bytes;
        while let Some((first, after)) = rest.split_first() {
            if let Some(after) = rest.strip_prefix(b"VOLUME") {
                text.extend(self.volume.as_bytes());
                rest = after;
            } else {
                text.push(*first);
                rest = after;
            }
        }
        text
    }
}

/// A connection of a program to the web port. No answer may contain a file from outside of the
/// volume.
pub(crate) fn api(folder: &Path, bytes: &[u8]) {
    let pod = Pod::shared(folder);
    let said = pod.bytes(bytes);
    let rules = Rules { open: true, ..Rules::default() };
    let router = routes::router(pod.web.clone(), rules, Farewell::default(), web::routes(&pod.web));
    let answer = pod.runtime.block_on(async {
        let (near, far) = duplex(64 << 10);
        let line = Connection { address: "10.0.0.9".parse().ok(), tls: false };
        let service = TowerToHyperService::new(router.layer(Extension(line)));
        let serve = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(END)
            .max_buf_size(32 << 10)
            .serve_connection(TokioIo::new(far), service)
            .with_upgrades();
        let (mut reader, mut writer) = split(near);
        let speak = async {
            writer.write_all(&said).await.ok();
            writer.shutdown().await.ok();
        };
        let hear = async {
            let mut all = Vec::new();
            (&mut reader).take(MAX_ANSWER as u64).read_to_end(&mut all).await.ok();
            all
        };
        let all = async { tokio::join!(serve, speak, hear).2 };
        timeout(END, all).await.expect("the connection ends after the end of the input")
    });
    check(&answer);
}

/// A connection to the pod's socket. Each line gets an answer, which is a line of JSON.
pub(crate) fn inquiry(folder: &Path, bytes: &[u8]) {
    let pod = Pod::shared(folder);
    let path = Path::new(&pod.volume).with_file_name("room").join("pod.sock");
    let answer = pod.runtime.block_on(async {
        let mut stream = UnixStream::connect(&path).await.expect("the pod's socket");
        let (mut reader, mut writer) = stream.split();
        let speak = async {
            writer.write_all(bytes).await.ok();
            writer.shutdown().await.ok();
        };
        let hear = async {
            let mut all = Vec::new();
            (&mut reader).take(MAX_ANSWER as u64).read_to_end(&mut all).await.ok();
            all
        };
        let all = async { tokio::join!(speak, hear).1 };
        timeout(END, all).await.expect("the connection ends after the end of the input")
    });
    check(&answer);
    let lines = bytes.split_inclusive(|byte| *byte == b'\n').count();
    let answers: Vec<_> = answer.split_inclusive(|byte| *byte == b'\n').collect();
    assert_eq!(answers.len(), lines, "each line has an answer");
    for line in answers {
        let value: serde_json::Value = serde_json::from_slice(line).expect("an answer is JSON");
        assert!(value.get("ok").is_some() || value.get("error").is_some(), "{value}");
    }
}

fn check(answer: &[u8]) {
    assert!(answer.len() < MAX_ANSWER, "the answer is too long");
    let secret = answer.windows(SECRET.len()).any(|it| it == SECRET.as_bytes());
    assert!(!secret, "the answer has a file from outside of the volume");
}
