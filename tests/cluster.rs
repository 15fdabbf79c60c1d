//! Pods as clusters run them, each with a Linux that is on the disk of its volume: restricted, with
//! a tap, and with all rights. They are seen from outside: ports, names, packets, and their end.
#![forbid(unsafe_code)]

#[path = "cluster/agent.rs"]
mod agent;
#[path = "cluster/pod.rs"]
mod pod;
#[path = "cluster/town.rs"]
mod town;

use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::Signal;
use transom_tests::lab::Lab;
use transom_tests::network::checksum;
use transom_tests::program::memory_kib;
use transom_tests::say;
use transom_tests::suite::{Suite, Test};

use self::pod::{ALL, BOOT, Pod, Profile, line};
use self::town::{GIVE, MTU, OUTSIDE, OUTSIDE_6, TAKE, Town, WHO, data, six};

const ASSETS: &[&str] = &["POD_DISK", "BOOT_CD", "OVMF_CODE_12"];
/// As the pods are told by TIMEOUT.
const BUDGET: Duration = Duration::from_secs(90);

fn main() -> ExitCode {
    let tests = vec![
        Test::new("restricted_and_compatible_pods_serve_side_by_side", side_by_side),
        Test::new("a_pod_with_a_tap_serves", with_a_tap),
        Test::new("a_medium_is_not_taken_for_the_disk", from_a_medium),
    ];
    Suite { lab: Lab { mib: 4096, seconds: 1800, assets: ASSETS }, tests }.main()
}

/// Pod Security "restricted".
const RESTRICTED: Profile = Profile {
    name: "restricted",
    last: 9,
    user: 10001,
    capabilities: "",
    privileged: false,
    tun: false,
    medium: false,
    words: &[
        "NETWORK=user",
        "HOST=ADA",
        "USER_PORTS=2222,8443,5000/udp,5900,7149,8006",
        "VNC_PORT=5900",
        agent::HEARS,
    ],
};
/// As deploy/kubernetes/tap gives it.
const TAP: Profile = Profile {
    name: "tap",
    last: 10,
    user: 0,
    capabilities: "NET_ADMIN NET_BIND_SERVICE SETUID SETGID SETPCAP CHOWN DAC_OVERRIDE",
    privileged: false,
    tun: true,
    medium: false,
    words: &["VNC_PORT=5900", "HOST=BOB", "DISK_TYPE=blk", "BOOT_MODE=windows_secure"],
};
/// The first, with a CD that something is installed from.
const MEDIUM: Profile =
    Profile { name: "medium", last: 12, medium: true, words: &["NETWORK=user"], ..RESTRICTED };
/// A privileged container.
const COMPATIBLE: Profile = Profile {
    name: "compat",
    last: 11,
    user: 0,
    capabilities: ALL,
    privileged: true,
    tun: true,
    medium: false,
    words: &["VNC_PORT=5900", "HOST=EVE", "DISK_TYPE=nvme", agent::HEARS],
};

fn side_by_side() -> anyhow::Result<()> {
    let town = Town::new()?;
    let mut pods = [(RESTRICTED, "ADA"), (COMPATIBLE, "EVE")].map(|(profile, guest)| {
        let pod = Pod::start(&town, &profile);
        (profile, pod, guest)
    });
    for (profile, pod, guest) in &mut pods {
        let pod = pod.as_mut().map_err(|error| anyhow::anyhow!("{error:#}"))?;
        serves(&town, profile, pod, guest).with_context(|| pod.log())?;
        timed(pod, "the agent", |pod| agent::serves(&town, pod))?;
    }
    let [(_, restricted, guest), (_, compatible, _)] = pods;
    let mut pod = compatible?;
    // Its guest switches itself off, while nobody asked.
    pod.order(&town, "poweroff -f")?;
    let status = pod.ends(BUDGET)?;
    ensure!(status == 0, "{status}: {}", pod.log());
    ensure!(pod.log().contains("Windows is off"), "{}", pod.log());
    let mut pod = restricted?;
    timed(&mut pod, "another agent", |pod| agent::comes_again(&town, pod))?;
    restarts(&town, &mut pod, guest).with_context(|| pod.log())?;
    timed(&mut pod, "the agent after a new start", agent::is_back)?;
    stops(&mut pod, BY_AGENT)
}

fn with_a_tap() -> anyhow::Result<()> {
    let town = Town::new()?;
    let mut pod = Pod::start(&town, &TAP)?;
    pod.until(&town, ("/healthz", 200), BOOT)?;
    for path in ["/startupz", "/readyz"] {
        let (status, said) = pod.page(&town, path)?;
        ensure!(status == 503, "{path}: {said}");
    }
    serves(&town, &TAP, &mut pod, "BOB").with_context(|| pod.log())?;
    stops(&mut pod, BY_BUTTON)
}

fn from_a_medium() -> anyhow::Result<()> {
    let town = Town::new()?;
    let mut pod = Pod::start(&town, &MEDIUM)?;
    // Nobody but the pod presses one.
    pod.says("a key was pressed", 1, BOOT)?;
    ensure!(!pod.volume.join("windows.boot").exists(), "the CD is the disk: {}", pod.log());
    // Who installs is not asked.
    let start = Instant::now();
    pod.signal(Signal::TERM)?;
    let status = pod.ends(BUDGET)?;
    ensure!(status == 143, "{status}: {}", pod.log());
    ensure!(pod.said("asked to shut down") == 0, "{}", pod.log());
    say!("{}: it ends after {:.1} s", pod.name, start.elapsed().as_secs_f64());
    Ok(())
}

/// The guest starts its machine again, and is there as before.
fn restarts(town: &Town, pod: &mut Pod, guest: &str) -> anyhow::Result<()> {
    let (start, times) = (Instant::now(), pod.said("the guest serves"));
    pod.order(town, "reboot -f")?;
    pod.says("the guest serves", times + 1, BOOT)?;
    pod.until(town, ("/readyz", 200), BOOT)?;
    is_reached(town, pod, guest).context("after a new start")?;
    say!("{}: a new start takes {:.1} s", pod.name, start.elapsed().as_secs_f64());
    Ok(())
}

/// A part of what is looked at, with the name of the guest.
type Step = fn(&Town, &Pod, &str) -> anyhow::Result<()>;

/// All that is true of a pod while it runs.
fn serves(town: &Town, profile: &Profile, pod: &mut Pod, guest: &str) -> anyhow::Result<()> {
    pod.until(town, ("/healthz", 200), BOOT)?;
    pod.until(town, ("/readyz", 200), BOOT)?;
    say!("{}: the guest is ready {:.1} s after its pod's start", pod.name, pod.age());
    // The lab's processor gives a kernel wrong flags at times: it starts again then.
    say!("{}: {} panics of its kernel", pod.name, pod.said("Kernel panic"));
    pod.says("the guest serves", 1, BOOT)?;
    let steps: [(&str, Step); 5] = [
        ("what is reached from outside", is_reached),
        ("what is kept", keeps),
        ("names, and the lease", knows_names),
        ("what the guest reaches", reaches),
        ("IPv6", knows_ipv6),
    ];
    for (name, step) in steps {
        let start = Instant::now();
        step(town, pod, guest).context(name)?;
        say!("{}: {name}: {:.1} s", pod.name, start.elapsed().as_secs_f64());
    }
    ensure!(pod.page(town, "/startupz")?.0 == 200, "it has not started");
    is_nobody(profile, pod).context("what the process of the machine may")?;
    let [ours, machine] = pod.processes()?.map(|it| memory_kib(it, "Pss"));
    let name = pod.name;
    say!("{name}: PSS of `transom` {} KiB, of `vmm` {} KiB without the guest's", ours?, machine?);
    ensure!(pod.volume.join("windows.boot").exists(), "nobody wrote down that it started");
    is_secure_if_said(profile, pod)
}

/// The guest's own kernel tells, and the volume remembers.
fn is_secure_if_said(profile: &Profile, pod: &Pod) -> anyhow::Result<()> {
    let secure = profile.words.contains(&"BOOT_MODE=windows_secure");
    let (words, memory) = match secure {
        true => (["Secure Boot: enabled", "TPM: 2"], "windows_secure.vars"),
        false => (["Secure Boot: disabled", "TPM: none"], "windows.vars"),
    };
    // A kernel that starts anew says it anew.
    for words in words {
        ensure!(pod.said(words) > 0, "no {words:?}: {}", pod.log());
    }
    let opposite = if secure { "Secure Boot: disabled" } else { "Secure Boot: enabled" };
    ensure!(pod.said(opposite) == 0, "{opposite}: {}", pod.log());
    if secure {
        has_nothing(pod.child("swtpm")?, 10002).context("what the TPM may")?;
    }
    let kept = fs::metadata(pod.volume.join("windows_secure.tpm"));
    ensure!(kept.is_ok_and(|it| it.len() > 0) == secure, "the memory of the TPM");
    ensure!(pod.volume.join(memory).exists(), "no {memory}");
    ensure!(pod.volume.join("windows.mode").exists() == secure, "the mode is remembered wrongly");
    Ok(())
}

/// A connection request as a client of remote desktops sends it (MS-RDPBCGR 2.2.1.1).
const REQUEST: [u8; 19] = [3, 0, 0, 19, 14, 0xe0, 0, 0, 0, 0, 0, 1, 0, 8, 0, 3, 0, 0, 0];

fn is_reached(town: &Town, pod: &Pod, guest: &str) -> anyhow::Result<()> {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let desktop = town.outside.ask((pod.address, 3389), REQUEST)?;
    ensure!(desktop.get(5) == Some(&0xd0) && desktop.len() > 19, "3389: {desktop:?}");
    let name = text(desktop[19..].to_vec());
    ensure!(name.trim() == guest, "the desktop of {name:?}, not of {guest}");
    let said = text(town.outside.ask((pod.address, 8443), "")?);
    ensure!(said.trim() == format!("guest {guest}"), "8443: {said:?}");
    let said = town.outside.call((pod.address, 5000), "hello\n")?;
    ensure!(said.trim() == format!("guest {guest} heard hello"), "5000/udp: {said:?}");
    // As `kubectl port-forward` comes: from the pod itself.
    let desktop = pod.space.ask((Ipv4Addr::LOCALHOST, 3389), REQUEST)?;
    ensure!(desktop.ends_with(format!("{guest}\n").as_bytes()), "port-forward: {desktop:?}");
    Ok(())
}

fn keeps(town: &Town, pod: &Pod, _: &str) -> anyhow::Result<()> {
    // The guest listens on all of these.
    for port in [5900, 7149, 8006] {
        let said = pod.guest(town, &format!("nc 127.0.0.1 {port}"))?;
        ensure!(said.starts_with("guest "), "in the guest, {port}: {said:?}");
    }
    for (path, status, words) in [
        ("/", 303, "location: login"),
        ("/login", 200, "name=\"password\""),
        ("/healthz", 200, "ok"),
        ("/metrics", 401, ""),
    ] {
        let (got, answer) = pod.page(town, path)?;
        ensure!(got == status && answer.contains(words), "{path}: {answer}");
    }
    let to = (pod.address, 5900).into();
    let banner = town.outside.within(move || {
        let mut stream = TcpStream::connect_timeout(&to, BOOT)?;
        stream.set_read_timeout(Some(BOOT))?;
        let mut banner = [0; 12];
        std::io::Read::read_exact(&mut stream, &mut banner)?;
        Ok(banner)
    })?;
    ensure!(&banner == b"RFB 003.008\n", "5900: {banner:?}");
    let said = town.outside.ask((pod.address, 7149), "");
    ensure!(said.is_err(), "a port of HOST_PORTS answers: {said:?}");
    Ok(())
}

fn knows_names(town: &Town, pod: &Pod, guest: &str) -> anyhow::Result<()> {
    let said = pod.guest(town, "cat /etc/resolv.conf; hostname")?;
    ensure!(said.starts_with("search win.svc.cluster.local svc.cluster.local\n"), "{said}");
    ensure!(said.trim().ends_with(guest), "{said}");
    for (name, address) in [
        ("www.example", "10.88.0.1"),
        // By the guest's own search, and by ours, which is for names with dots.
        ("web", "10.88.0.50"),
        ("web.other", "10.88.0.51"),
        ("web.svc.cluster.local", "10.88.0.50"),
    ] {
        let said = pod.guest(town, &format!("nslookup {name}"))?;
        ensure!(said.contains(&format!("Address: {address}\n")), "{name}: {said}");
    }
    let said = pod.guest(town, "nslookup none.example")?;
    ensure!(said.contains("NXDOMAIN"), "{said}");
    // What the pod's own interface takes; of user mode only data leaves, in packets of the pod's.
    let wanted = if pod.said("user mode") > 0 { 1500 } else { MTU };
    let said = pod.guest(town, "cat /sys/class/net/eth0/mtu")?;
    ensure!(said.trim() == wanted.to_string(), "an MTU of {said}");
    Ok(())
}

fn reaches(town: &Town, pod: &Pod, _: &str) -> anyhow::Result<()> {
    let seen = format!("outside hears {}", pod.address);
    // A datagram may be lost, and what asks leaves when there is no answer for two seconds.
    let call = format!("(echo hello; sleep 2) | nc.openbsd -u -W 1 {OUTSIDE} {WHO}");
    let calls = format!("for i in 1 2 3 4 5; do said=$( {call}); [ -z \"$said\" ] || break; done");
    for words in [format!("nc www.example {WHO}"), format!("{calls}; echo $said")] {
        let said = pod.guest(town, &words)?;
        ensure!(said.trim() == seen, "{words}: {said}");
    }
    for size in [56, 1400, 4000] {
        let said = pod.guest(town, &format!("ping -A -c 3 -W 20 -s {size} {OUTSIDE}"))?;
        ensure!(said.contains(" 0% packet loss"), "{said}");
    }
    let data = data();
    let said = pod.guest(town, &format!("nc {OUTSIDE} {GIVE} > /data; md5sum < /data"))?;
    ensure!(said.starts_with(&checksum(&data)?), "not what was sent: {said}");
    let said = pod.guest(town, &format!("cat /data | nc {OUTSIDE} {TAKE}"))?;
    ensure!(said == "all of it", "what comes back: {said}");
    Ok(())
}

/// By IPv6 the desktop is reached in any mode. In user mode the guest has what the pod has.
fn knows_ipv6(town: &Town, pod: &Pod, guest: &str) -> anyhow::Result<()> {
    let own = six(pod.address.octets()[3].into());
    let desktop = town.outside.ask((own, 3389), REQUEST)?;
    ensure!(desktop.ends_with(format!("{guest}\n").as_bytes()), "{own}: {desktop:?}");
    if pod.said("user mode") == 0 {
        return Ok(());
    }
    let said = pod.guest(town, &format!("nc {OUTSIDE_6} {WHO}"))?;
    ensure!(said.trim() == format!("outside hears {own}"), "{said}");
    let said = pod.guest(town, &format!("ping6 -A -c 3 -W 20 {OUTSIDE_6}"))?;
    ensure!(said.contains(" 0% packet loss"), "{said}");
    Ok(())
}

/// A process is this user, and has no right.
fn has_nothing(process: u32, user: u32) -> anyhow::Result<()> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let user = [(); 4].map(|()| user.to_string()).join(" ");
    for (name, words) in [
        ("Uid", user.as_str()),
        ("Gid", user.as_str()),
        ("CapInh", "0000000000000000"),
        ("CapPrm", "0000000000000000"),
        ("CapEff", "0000000000000000"),
        ("CapAmb", "0000000000000000"),
        ("NoNewPrivs", "1"),
        ("Seccomp", "2"),
    ] {
        let found = line(&status, name)?;
        ensure!(found == words, "{name} is {found}, not {words}");
    }
    Ok(())
}

/// Whoever breaks out of the machine is nobody.
fn is_nobody(profile: &Profile, pod: &Pod) -> anyhow::Result<()> {
    let [_, machine] = pod.processes()?;
    has_nothing(machine, 10001)?;
    let bounding = line(&fs::read_to_string(format!("/proc/{machine}/status"))?, "CapBnd")?;
    ensure!(bounding == "0000000000000000", "CapBnd is {bounding}");
    let links = fs::read_to_string(format!("/proc/{machine}/net/dev"))?;
    // Who may make no namespace stays in the pod's, but has no system calls for it.
    let alone = !links.contains("eth0") && !links.contains("qemu");
    ensure!(alone == profile.privileged, "the network of the machine's process: {links}");
    let said = pod.exec(&["/transom/transom", "probe", "ready"])?;
    ensure!(said.trim() == "ok", "{said}");
    Ok(())
}

/// Looks at something of a pod, and tells how long that takes.
fn timed(
    pod: &mut Pod,
    what: &str,
    look: impl FnOnce(&mut Pod) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let start = Instant::now();
    look(pod).with_context(|| pod.log()).with_context(|| what.to_owned())?;
    say!("{}: {what}: {:.1} s", pod.name, start.elapsed().as_secs_f64());
    Ok(())
}

/// What guests say that end.
const BY_BUTTON: &str = "the button was pressed";
const BY_AGENT: &str = "the agent was asked: shutdown";

/// A cluster tells it to end, and its guest hears that in its way.
fn stops(pod: &mut Pod, why: &str) -> anyhow::Result<()> {
    let start = Instant::now();
    pod.signal(Signal::TERM)?;
    let status = pod.ends(BUDGET)?;
    let took = start.elapsed();
    say!("{}: it ends after {:.1} s", pod.name, took.as_secs_f64());
    ensure!(status == 143 && took < BUDGET, "{status} after {took:?}: {}", pod.log());
    ensure!(pod.log().contains(why), "{}", pod.log());
    ensure!(why == BY_AGENT || pod.said(BY_AGENT) == 0, "{}", pod.log());
    Ok(())
}
