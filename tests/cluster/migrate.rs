//! A running machine moves to another pod on the same volume, and back. The other pod also takes
//! over when the first one fails.

use std::io::Write as _;
use std::net::TcpStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::Signal;
use transom_tests::say;

use super::pod::{BOOT, Pod, Profile};
use super::suspend::{MEMORY, MODEL};
use super::town::{SOON, Town};
use super::{TAP, has_desktop};

pub(crate) const WORD: &str = "SHUTDOWN=migrate";
/// The lab sends a few MB in a second.
pub(crate) const PAUSE: &str = "MIGRATE_PAUSE=8000";
const LONG: Duration = Duration::from_secs(900);
const PORT: u16 = 49152;
/// Connections of strangers, which say nothing or nonsense.
const STRANGERS: usize = 40;

const FIRST: Profile = Profile {
    name: "first",
    last: 22,
    words: &["HOST=BOB", "BOOT_MODE=windows_secure", WORD, PAUSE, "TIMEOUT=900", MODEL],
    ..TAP
};
const HEIR: Profile = Profile {
    name: "heir",
    last: 21,
    // It soon gives up to wait for another pod.
    words: &["HOST=BOB", "BOOT_MODE=windows_secure", WORD, PAUSE, "TIMEOUT=60", MODEL],
    ..TAP
};

/// A program of the guest counts, and writes that to its memory.
const COUNT: &str = "[ -e /count ] || ((i=0; while :; do i=$((i+1)); echo $i > /next; \
    mv /next /count; sleep 1; done) > /dev/null 2>&1 &); sleep 2; cat /count";
const WAITS: &str = "Another pod runs Windows: waiting for it at port 49152";

pub(crate) fn moves() -> anyhow::Result<()> {
    let (town, guest) = (&Town::new()?, "BOB");
    let mut first = Pod::start(town, &FIRST)?;
    first.says("the guest serves", 1, BOOT)?;
    first.until(town, ("/readyz", 200), BOOT)?;
    first.guest(town, "head -c 1000000 /dev/urandom > /data")?;
    let before = Before { memory: first.guest(town, MEMORY)?, count: counts(town, &first, 0)? };
    let refused = first.transom(&["migrate"])?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(said.contains("no other pod waits for the machine"), "{said}");
    let mut second = first.beside(town, &HEIR)?;
    second.says(WAITS, 1, SOON)?;
    let strangers = strangers(town, &second)?;
    let start = Instant::now();
    first.signal(Signal::TERM)?;
    let status = first.ends(LONG).with_context(|| second.log())?;
    let moved = format!("Windows has moved to {} in", second.address);
    ensure!(status == 143 && first.said(&moved) == 1, "{status}: {}", first.log());
    let moved = first.log().lines().find(|it| it.contains(&moved)).unwrap_or_default().to_owned();
    say!("{}: {moved}; stopped in {:.1} s", first.name, start.elapsed().as_secs_f64());
    drop(strangers);
    arrived(town, &mut second, guest, &before).with_context(|| second.log())?;
    let mut pod = moves_back(town, [first, second], guest, &before)?;
    pod.signal(Signal::TERM)?;
    let status = pod.ends(LONG)?;
    let log = pod.log();
    let said = log.contains("no other pod waits") && log.contains("Windows is suspended");
    ensure!(status == 143 && said, "{status}: {log}");
    Ok(())
}

/// The guest before its machine moves.
struct Before {
    memory: String,
    count: u64,
}

fn arrived(town: &Town, pod: &mut Pod, guest: &str, before: &Before) -> anyhow::Result<()> {
    pod.says("Windows has arrived from another pod", 1, SOON)?;
    has_desktop(town, pod, guest)?;
    let memory = pod.guest(town, MEMORY).with_context(|| state(town, pod))?;
    ensure!(memory == before.memory, "{}, then {memory}", before.memory);
    counts(town, pod, before.count).with_context(|| state(town, pod))?;
    pod.until(town, ("/readyz", 200), BOOT)
}

/// The state of a pod whose guest did not answer in time, and whether it answers now.
fn state(town: &Town, pod: &Pod) -> String {
    let control = ["/transom/vmm", "ctl", "--control", "/run/transom/vmm.sock"];
    let ask = |word| pod.exec(&[&control[..], &[word]].concat());
    let asked = ["status", "registers", "registers"].map(ask);
    let answers = ["date", "sleep 1; date", "cat /count"].map(|words| pod.guest(town, words));
    format!("{asked:?}\n{answers:?}\n{}", pod.log())
}

/// The command moves the machine back.
fn moves_back(
    town: &Town,
    [mut first, mut second]: [Pod; 2],
    guest: &str,
    before: &Before,
) -> anyhow::Result<Pod> {
    first.again(&[], &[])?;
    first.says(WAITS, 1, SOON)?;
    let moved = second.transom(&["migrate", "--wait", "60", "--within", "300"])?;
    let said = String::from_utf8_lossy(&moved.stdout).trim().to_owned();
    let to = format!("moved to {} in", first.address);
    ensure!(moved.status.success() && said.starts_with(&to), "{moved:?}: {}", second.log());
    say!("{}: {said}", second.name);
    let status = second.ends(SOON)?;
    ensure!(status == 0 && second.said("Windows runs in another pod") == 1, "{}", second.log());
    arrived(town, &mut first, guest, before).with_context(|| first.log())?;
    stays(town, [&mut first, &mut second], before).with_context(|| first.log())?;
    takes_over(town, first, second)
}

/// The node of the other pod fails while the machine moves.
fn stays(town: &Town, [first, second]: [&mut Pod; 2], before: &Before) -> anyhow::Result<()> {
    second.again(&[], &[])?;
    second.says(WAITS, 1, SOON)?;
    let moves = first.start_transom(&["migrate"])?;
    second.says("a machine arrives", 1, SOON)?;
    second.fails();
    let moved = moves.wait_with_output()?;
    let said = String::from_utf8_lossy(&moved.stderr).into_owned();
    ensure!(!moved.status.success() && said.contains("the machine stays"), "{moved:?}");
    let memory = first.guest(town, MEMORY)?;
    ensure!(memory == before.memory, "{}, then {memory}", before.memory);
    counts(town, first, before.count).map(drop)
}

/// The node of the first pod fails. The guest boots in the other one.
fn takes_over(town: &Town, mut first: Pod, mut second: Pod) -> anyhow::Result<Pod> {
    second.again(&[], &[])?;
    second.says(WAITS, 1, SOON)?;
    first.fails();
    second.says("The other pod is gone: Windows starts here", 1, SOON)?;
    second.says("the guest serves", 1, BOOT)?;
    second.until(town, ("/readyz", 200), BOOT)?;
    Ok(second)
}

/// The guest counts on from there.
fn counts(town: &Town, pod: &Pod, before: u64) -> anyhow::Result<u64> {
    let said = pod.guest(town, COUNT)?;
    let now: u64 = said.trim().parse().with_context(|| said.clone())?;
    sleep(Duration::from_secs(2));
    let later: u64 = pod.guest(town, "cat /count")?.trim().parse()?;
    ensure!(later > now && now > before, "{before}, {now}, {later}");
    Ok(later)
}

/// Others who connect keep nobody away.
fn strangers(town: &Town, pod: &Pod) -> anyhow::Result<Vec<TcpStream>> {
    let to = (pod.address, PORT);
    town.outside.within(move || {
        let connect = |number: usize| {
            let mut stream = TcpStream::connect(to)?;
            if number.is_multiple_of(2) {
                stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")?;
            }
            Ok(stream)
        };
        (0..STRANGERS).map(connect).collect()
    })
}
