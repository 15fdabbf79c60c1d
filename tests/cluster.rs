//! Pods as clusters run them, each with a Linux on the disk of its volume: restricted, with a tap,
//! and privileged. They are checked from outside: ports, names, packets, and shutdown.
#![forbid(unsafe_code)]

#[path = "cluster/agent.rs"]
mod agent;
#[path = "cluster/clones.rs"]
mod clones;
#[path = "cluster/idle.rs"]
mod idle;
#[path = "cluster/migrate.rs"]
mod migrate;
#[path = "cluster/pod.rs"]
mod pod;
#[path = "cluster/share.rs"]
mod share;
#[path = "cluster/suspend.rs"]
mod suspend;
#[path = "cluster/town.rs"]
mod town;

use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::Signal;
use transom_tests::lab::{Lab, everything};
use transom_tests::network::checksum;
use transom_tests::program::memory_kib;
use transom_tests::say;
use transom_tests::suite::{Suite, Test};

use self::pod::{ALL, BOOT, DiskOf, OWNER, Pod, Profile, line};
use self::suspend::Change;
use self::town::{GIVE, MTU, OUTSIDE, OUTSIDE_6, TAKE, Town, WHO, data, six};

const ASSETS: &[&str] = &["POD_DISK", "BOOT_CD", "OVMF_CODE_12", "QEMU_IMG"];
/// The grace period of the pods' TIMEOUT.
const BUDGET: Duration = Duration::from_secs(180);

fn main() -> ExitCode {
    let tests = vec![
        // The pods over a base are restricted, too, and the suite `user_mode` tests their network.
        Test::new("a_restricted_pod_serves", restricted).thorough(),
        // The suite `kube` starts privileged pods, and `rehearsal` has guests that restart and end.
        Test::new("restricted_and_compatible_pods_serve_side_by_side", side_by_side).thorough(),
        Test::new("a_pod_with_a_tap_serves", with_a_tap),
        // Machines move between processes in the suites `snapshot` and `probe`, too.
        Test::new("a_machine_moves_to_another_pod", migrate::moves).thorough(),
        Test::new("pods_share_a_base", clones::share_a_base),
        // The suite `probe` has clones of a running machine.
        Test::new("pods_go_on_in_one_memory", clones::share_a_memory).thorough(),
        // A pod over a base sleeps, too, in user mode. The suite `probe` wakes a machine by a tap.
        Test::new("a_sleeping_pod_serves_its_first_connection", idle::first_connections_are_served)
            .thorough(),
        // The suite `desktop` starts a pod from a CD.
        Test::new("a_medium_is_not_taken_for_the_disk", from_a_medium).thorough(),
    ];
    // A guest with 3 GiB sleeps on a volume that is in the lab's memory.
    let mib = if everything() { 10240 } else { 4096 };
    Suite { lab: Lab { mib, seconds: 1800, assets: ASSETS }, tests }.main()
}

/// Pod Security level "restricted".
const RESTRICTED: Profile = Profile {
    name: "restricted",
    last: 9,
    user: 10001,
    owner: OWNER,
    capabilities: "",
    privileged: false,
    tun: false,
    disk: DiskOf::Volume,
    words: &[
        "NETWORK=user",
        "HOST=ADA",
        "USER_PORTS=2222,8443,5000/udp,5900,7149,8006",
        "VNC_PORT=5900",
        agent::HEARS,
        suspend::WORD,
    ],
};
/// The rights that deploy/kubernetes/tap gives.
const TAP: Profile = Profile {
    name: "tap",
    last: 10,
    user: 0,
    // As a container engine makes it.
    owner: 0,
    capabilities: "NET_ADMIN NET_BIND_SERVICE SETUID SETGID SETPCAP CHOWN DAC_OVERRIDE",
    privileged: false,
    tun: true,
    disk: DiskOf::Volume,
    words: &[
        "VNC_PORT=5900",
        "HOST=BOB",
        "DISK_TYPE=blk",
        "BOOT_MODE=windows_secure",
        suspend::WORD,
        suspend::MODEL,
    ],
};
/// Like RESTRICTED, with an installation CD.
const MEDIUM: Profile = Profile {
    name: "medium",
    last: 12,
    disk: DiskOf::Medium,
    // The CD is not Windows, and has no signature.
    words: &["NETWORK=user", "MANUAL=Y", "BOOT_MODE=windows"],
    ..RESTRICTED
};
/// A privileged container.
const COMPATIBLE: Profile = Profile {
    name: "compat",
    last: 11,
    user: 0,
    owner: OWNER,
    capabilities: ALL,
    privileged: true,
    tun: true,
    disk: DiskOf::Volume,
    words: &["VNC_PORT=5900", "HOST=EVE", "DISK_TYPE=nvme", agent::HEARS],
};

fn restricted() -> anyhow::Result<()> {
    let (town, guest) = (Town::new()?, "ADA");
    let mut pod = Pod::start(&town, &RESTRICTED)?;
    serves(&town, &RESTRICTED, &mut pod, guest).with_context(|| pod.log())?;
    timed(&mut pod, "the agent", |pod| agent::serves(&town, pod))?;
    goes_on(&town, &mut pod, guest)?;
    timed(&mut pod, "another agent", |pod| agent::comes_again(&town, pod))?;
    stops(&mut pod, BY_AGENT)
}

/// The pod is suspended and continued.
fn goes_on(town: &Town, pod: &mut Pod, guest: &str) -> anyhow::Result<()> {
    // In the user-mode network, connections are the pod's.
    let change = Change { without: &[suspend::WORD], with: &[] };
    suspend::continues(town, pod, guest, false, &change).with_context(|| pod.log())?;
    timed(pod, "the agent after a suspension", |pod| suspend::knows_the_time(town, pod))
}

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
    // The guest switches itself off, without a request from outside.
    pod.order(&town, "poweroff -f")?;
    let status = pod.ends(BUDGET)?;
    ensure!(status == 0, "{status}: {}", pod.log());
    ensure!(pod.log().contains("Windows is off"), "{}", pod.log());
    let mut pod = restricted?;
    timed(&mut pod, "another agent", |pod| agent::comes_again(&town, pod))?;
    restarts(&town, &mut pod, guest).with_context(|| pod.log())?;
    timed(&mut pod, "the agent after a new start", agent::is_back)?;
    goes_on(&town, &mut pod, guest)?;
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
    // It continues with all features of the processor.
    let change = Change { without: &[suspend::WORD, suspend::MODEL], with: &[] };
    suspend::continues(&town, &mut pod, "BOB", true, &change).with_context(|| pod.log())?;
    stops(&mut pod, BY_BUTTON)
}

fn from_a_medium() -> anyhow::Result<()> {
    let town = Town::new()?;
    let mut pod = Pod::start(&town, &MEDIUM)?;
    // The pod itself presses the key that the CD waits for.
    pod.says("a key was pressed", 1, BOOT)?;
    ensure!(
        !pod.volume.join("windows.boot").exists(),
        "the CD was taken for the disk: {}",
        pod.log()
    );
    // A guest that is being installed is not asked to shut down.
    let start = Instant::now();
    pod.signal(Signal::TERM)?;
    let status = pod.ends(BUDGET)?;
    ensure!(status == 143, "{status}: {}", pod.log());
    ensure!(pod.said("asked to shut down") == 0, "{}", pod.log());
    say!("{}: ended after {:.1} s", pod.name, start.elapsed().as_secs_f64());
    Ok(())
}

/// Reboots the guest's machine, and checks that the guest serves again.
fn restarts(town: &Town, pod: &mut Pod, guest: &str) -> anyhow::Result<()> {
    let (start, times) = (Instant::now(), pod.said("the guest serves"));
    pod.order(town, "reboot -f")?;
    pod.says("the guest serves", times + 1, BOOT)?;
    pod.until(town, ("/readyz", 200), BOOT)?;
    is_reached(town, pod, guest).context("after a new start")?;
    say!("{}: restarted in {:.1} s", pod.name, start.elapsed().as_secs_f64());
    Ok(())
}

/// A check of a running pod; the last parameter is the guest's name.
type Step = fn(&Town, &Pod, &str) -> anyhow::Result<()>;

/// Checks a running pod.
fn serves(town: &Town, profile: &Profile, pod: &mut Pod, guest: &str) -> anyhow::Result<()> {
    pod.until(town, ("/healthz", 200), BOOT)?;
    pod.until(town, ("/readyz", 200), BOOT)?;
    say!("{}: the guest is ready {:.1} s after its pod's start", pod.name, pod.age());
    // The lab's processor sometimes gives a kernel wrong flags; the machine then starts again.
    say!("{}: {} kernel panics", pod.name, pod.said("Kernel panic"));
    pod.says("the guest serves", 1, BOOT)?;
    let steps: [(&str, Step); 6] = [
        ("access from outside", is_reached),
        ("the pod's own ports", keeps),
        ("DNS and DHCP", knows_names),
        ("access from the guest", reaches),
        ("IPv6", knows_ipv6),
        ("the shared folder", share::works),
    ];
    for (name, step) in steps {
        let start = Instant::now();
        step(town, pod, guest).context(name)?;
        say!("{}: {name}: {:.1} s", pod.name, start.elapsed().as_secs_f64());
    }
    ensure!(pod.page(town, "/startupz")?.0 == 200, "/startupz is not 200");
    has_no_rights(profile, pod).context("the rights of the machine's process")?;
    let [ours, machine] = pod.processes()?.map(|it| memory_kib(it, "Pss"));
    let name = pod.name;
    say!("{name}: PSS of `transom` {} KiB, of `vmm` {} KiB without guest RAM", ours?, machine?);
    ensure!(pod.volume.join("windows.boot").exists(), "no windows.boot after the guest started");
    has_secure_boot_as_configured(profile, pod)
}

/// Secure Boot and TPM are as configured, in the guest's kernel log and on the volume.
fn has_secure_boot_as_configured(profile: &Profile, pod: &Pod) -> anyhow::Result<()> {
    let secure = profile.words.contains(&"BOOT_MODE=windows_secure");
    let (words, memory) = match secure {
        true => (["Secure Boot: enabled", "TPM: 2"], "windows_secure.vars"),
        false => (["Secure Boot: disabled", "TPM: none"], "windows.vars"),
    };
    // The kernel reports it again after each start.
    for words in words {
        ensure!(pod.said(words) > 0, "no {words:?}: {}", pod.log());
    }
    let opposite = if secure { "Secure Boot: disabled" } else { "Secure Boot: enabled" };
    ensure!(pod.said(opposite) == 0, "{opposite}: {}", pod.log());
    if secure {
        has_nothing(pod.child("swtpm")?, 10002).context("the rights of the TPM")?;
    }
    let kept = fs::metadata(pod.volume.join("windows_secure.tpm"));
    ensure!(kept.is_ok_and(|it| it.len() > 0) == secure, "the TPM's state file");
    ensure!(pod.volume.join(memory).exists(), "no {memory}");
    ensure!(
        pod.volume.join("windows.mode").exists() == secure,
        "windows.mode: secure={secure} expected"
    );
    Ok(())
}

/// The connection request of a remote desktop client (MS-RDPBCGR 2.2.1.1).
const REQUEST: [u8; 19] = [3, 0, 0, 19, 14, 0xe0, 0, 0, 0, 0, 0, 1, 0, 8, 0, 3, 0, 0, 0];

/// The guest's remote desktop answers outside hosts.
fn has_desktop(town: &Town, pod: &Pod, guest: &str) -> anyhow::Result<()> {
    let desktop = town.outside.ask((pod.address, 3389), REQUEST)?;
    ensure!(desktop.get(5) == Some(&0xd0) && desktop.len() > 19, "3389: {desktop:?}");
    let name = String::from_utf8_lossy(&desktop[19..]);
    ensure!(name.trim() == guest, "reached the desktop of {name:?}, not of {guest}");
    Ok(())
}

fn is_reached(town: &Town, pod: &Pod, guest: &str) -> anyhow::Result<()> {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    has_desktop(town, pod, guest)?;
    let said = text(town.outside.ask((pod.address, 8443), "")?);
    ensure!(said.trim() == format!("guest {guest}"), "8443: {said:?}");
    let said = town.outside.call((pod.address, 5000), "hello\n")?;
    ensure!(said.trim() == format!("guest {guest} heard hello"), "5000/udp: {said:?}");
    // `kubectl port-forward` connects from within the pod.
    let desktop = pod.space.ask((Ipv4Addr::LOCALHOST, 3389), REQUEST)?;
    ensure!(desktop.ends_with(format!("{guest}\n").as_bytes()), "port-forward: {desktop:?}");
    Ok(())
}

fn keeps(town: &Town, pod: &Pod, _: &str) -> anyhow::Result<()> {
    // The guest listens on all of these ports too.
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
        // By the guest's search domain, and by the pod's, which applies to names with dots.
        ("web", "10.88.0.50"),
        ("web.other", "10.88.0.51"),
        ("web.svc.cluster.local", "10.88.0.50"),
    ] {
        let said = pod.guest(town, &format!("nslookup {name}"))?;
        ensure!(said.contains(&format!("Address: {address}\n")), "{name}: {said}");
    }
    let said = pod.guest(town, "nslookup none.example")?;
    ensure!(said.contains("NXDOMAIN"), "{said}");
    // The MTU of the pod's interface. In user mode, only data leaves, in packets of the pod.
    let wanted = if pod.said("user mode") > 0 { 1500 } else { MTU };
    let said = pod.guest(town, "cat /sys/class/net/eth0/mtu")?;
    ensure!(said.trim() == wanted.to_string(), "an MTU of {said}");
    Ok(())
}

fn reaches(town: &Town, pod: &Pod, _: &str) -> anyhow::Result<()> {
    let seen = format!("outside hears {}", pod.address);
    // A datagram may be lost: nc gives up after two seconds without an answer, and is run again.
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
    ensure!(said.starts_with(&checksum(&data)?), "the guest received other data: {said}");
    let said = pod.guest(town, &format!("cat /data | nc {OUTSIDE} {TAKE}"))?;
    ensure!(said == "all of it", "the data came back changed: {said}");
    Ok(())
}

/// By IPv6, the desktop is reachable in every mode. In user mode, the guest has the pod's IPv6
/// access.
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

/// The process runs as this user, without any capability.
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

/// The machine's process has no rights, in case a guest breaks out.
fn has_no_rights(profile: &Profile, pod: &Pod) -> anyhow::Result<()> {
    let [_, machine] = pod.processes()?;
    has_nothing(machine, 10001)?;
    let bounding = line(&fs::read_to_string(format!("/proc/{machine}/status"))?, "CapBnd")?;
    ensure!(bounding == "0000000000000000", "CapBnd is {bounding}");
    let links = fs::read_to_string(format!("/proc/{machine}/net/dev"))?;
    // A pod that cannot make namespaces stays in its own, but seccomp blocks the network.
    let alone = !links.contains("eth0") && !links.contains("qemu");
    ensure!(alone == profile.privileged, "the network of the machine's process: {links}");
    let said = pod.exec(&["/transom/transom", "probe", "ready"])?;
    ensure!(said.trim() == "ok", "{said}");
    Ok(())
}

/// Runs a check and reports its duration.
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

/// The guest's messages on a shutdown.
const BY_BUTTON: &str = "the button was pressed";
const BY_AGENT: &str = "the agent was asked: shutdown";

/// Stops the pod as a cluster does, and checks how its guest was asked to shut down.
fn stops(pod: &mut Pod, why: &str) -> anyhow::Result<()> {
    let start = Instant::now();
    pod.signal(Signal::TERM)?;
    let status = pod.ends(BUDGET)?;
    let took = start.elapsed();
    say!("{}: ended after {:.1} s", pod.name, took.as_secs_f64());
    ensure!(status == 143 && took < BUDGET, "{status} after {took:?}: {}", pod.log());
    ensure!(pod.log().contains(why), "{}", pod.log());
    ensure!(why == BY_AGENT || pod.said(BY_AGENT) == 0, "{}", pod.log());
    Ok(())
}
