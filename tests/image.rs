//! The container image as people use it: built, started by Podman, checked from outside, and
//! stopped.
#![forbid(unsafe_code)]

#[path = "image/doctor.rs"]
mod doctor;
#[path = "image/failing.rs"]
mod failing;
#[path = "image/kube.rs"]
mod kube;
#[path = "image/pod.rs"]
mod pod;
#[path = "image/sight.rs"]
mod sight;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use container::pod::SHUT_DOWN;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use transom_tests::browser::Browser;
use transom_tests::engine::{self, DEBUG_IMAGE, Engine, IMAGE, runs_here};
use transom_tests::print::Picture;
use transom_tests::program::{PATIENCE, not_run, said};
use transom_tests::say;

use self::failing::Failing;
use self::pod::Pod;

/// Waits until the picture in the browser satisfies a condition.
fn until(browser: &mut Browser, enough: impl Fn(&Picture) -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !browser.picture(usize::MAX >> 1)?.is_some_and(|it| enough(&it)) {
        ensure!(Instant::now() < deadline, "timeout: the expected picture did not appear");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Checks user and capabilities of each process in a pod: `transom`, whose serving threads have no
/// capability; `vmm`; and `nft`, which waits for the end of the pod.
fn check_rights(pod: &Pod, wanted: [(u32, u64); 3]) -> Result<()> {
    let (first, all) = pod.processes()?;
    ensure!(all.iter().any(|it| it.name == "vmm"), "{all:?}");
    for process in &all {
        let name = process.name.as_str();
        let at = ["transom", "vmm", "nft"].iter().position(|it| *it == name);
        let (user, rights) = wanted[at.with_context(|| format!("unexpected process {name}"))?];
        for status in &process.threads {
            let main = status.contains(&format!("\nPid:\t{first}\n"));
            let rights = if main || name != "transom" { rights } else { 0 };
            // A third-party program has the engine's filter, if the engine has one.
            let ours = name != "nft";
            let (bounding, filter) = if ours { (0, "Seccomp:\t2\n") } else { (rights, "") };
            for line in [
                format!("Uid:\t{user}\t{user}\t{user}\t{user}\n"),
                format!("CapPrm:\t{rights:016x}\n"),
                format!("CapEff:\t{rights:016x}\n"),
                format!("CapBnd:\t{bounding:016x}\n"),
                "NoNewPrivs:\t1\n".into(),
                filter.into(),
            ] {
                ensure!(status.contains(&line), "{name}: no {line}in {status}");
            }
        }
        // Only the machine may have devices and files of the volume open.
        let strange = |file: &&PathBuf| {
            let shared = file.starts_with("/dev/shm") || file.ends_with("null");
            let device = file.starts_with("/dev") && !shared;
            name != "vmm" && (device || file.starts_with("/storage"))
        };
        let found: Vec<_> = process.files.iter().filter(strange).collect();
        ensure!(found.is_empty(), "{name} has {found:?}");
    }
    Ok(())
}

#[test]
fn the_probe_page_is_served_and_the_pod_stops_in_time() -> Result<()> {
    if !runs_here("the pod") {
        return Ok(());
    }
    let engine = Engine::get()?;
    let pod = Pod::start(engine, "probe", &["--env", "VERSION=probe"])?;
    pod.until("/readyz", 200)?;
    for (path, status, words) in [
        ("/healthz", 200, "ok"),
        ("/startupz", 200, "ok"),
        ("/", 200, "viewer.js"),
        ("/msg.html", 404, ""),
        ("/metrics", 200, "transom_machine_up 1\n"),
        ("/metrics", 200, "transom_phase{phase=\"running\"} 1\n"),
        ("/api/v1/state", 200, "\"phase\":\"running\""),
        ("/api/openapi.json", 200, "\"openapi\""),
        ("/log?after=0", 200, "probe"),
    ] {
        let answer = pod.get(path)?;
        ensure!(answer.status == status && answer.body.contains(words), "{path}: {answer:?}");
    }
    // The default network, where it is allowed, is a tap with address translation.
    let said = pod.logs()?;
    ensure!(said.contains("the guest is 172.30."), "{said}");
    // The machine's process has no rights, and the pod may only kill it.
    check_rights(&pod, [(0, 0x20), (10001, 0), (0, 0x1000)])?;
    // The probe has no agent, which has an exit status of its own.
    let (ended, said) = pod.run(&["/usr/bin/transom", "exec", "--timeout", "60", "true"])?;
    ensure!(ended == 125 && said.is_empty(), "{ended}: {said}");
    let (ended, said) = pod.run(&["/usr/bin/transom", "logs"])?;
    ensure!(ended == 0 && said.contains("the guest is 172.30."), "{ended}: {said}");
    for (word, status, words) in [("live", 0, "ok"), ("ready", 0, "ok"), ("never", 2, "")] {
        let (ended, said) = pod.run(&["/usr/bin/transom", "probe", word])?;
        ensure!(ended == status && said.trim() == words, "{word}: {ended}: {said}");
    }
    let start = Instant::now();
    let status = pod.stop(30)?;
    ensure!(status == 143, "{status}\n{}", pod.logs()?);
    ensure!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    // Tools wait for this line.
    ensure!(pod.logs()?.contains(SHUT_DOWN), "{}", pod.logs()?);
    Ok(())
}

#[test]
fn a_guest_shutdown_ends_the_pod_with_status_0() -> Result<()> {
    if !runs_here("the pod") {
        return Ok(());
    }
    let engine = Engine::get()?;
    let pod = Pod::start(engine, "off", &["--env", "VERSION=probe"])?;
    pod.until("/readyz", 200)?;
    for (text, status, words) in [
        ("Grüße", 422, r#""characters":["ü","ß"]"#),
        (r#"no\ttabs","skip":"yes"#, 422, ""),
        ("typed", 200, r#"{"skipped":[],"typed":5}"#),
    ] {
        let answer = pod.post("/api/v1/type", &format!(r#"{{"text":"{text}"}}"#))?;
        ensure!(answer.status == status && answer.body.contains(words), "{text}: {answer:?}");
    }
    let answer = pod.post("/api/v1/power", r#"{"action":"shutdown"}"#)?;
    ensure!(answer.status == 200, "{answer:?}");
    let status = pod.wait()?;
    ensure!(status == 0, "{status}\n{}", pod.logs()?);
    // `transom shutdown --wait` returns before the container ends.
    let pod = Pod::start(engine, "waits", &["--env", "VERSION=probe", "--env", "DISPLAY=none"])?;
    pod.until("/readyz", 200)?;
    let (ended, said) = pod.run(&["/usr/bin/transom", "shutdown", "--wait", "60"])?;
    ensure!(ended == 0, "{ended}: {said}");
    let status = pod.wait()?;
    ensure!(status == 0, "{status}\n{}", pod.logs()?);
    Ok(())
}

/// Like `docker compose up` with deploy/compose.yaml: the engine restarts a failed pod at once.
#[test]
fn a_failure_is_shown_and_restarts_are_delayed() -> Result<()> {
    if !runs_here("a failing pod that is started again") {
        return Ok(());
    }
    let engine = Engine::get()?;
    let words = ["--env", "VERSION=tiny11", "--env", "ERROR_HOLD=", "--restart", "always"];
    let start = Instant::now();
    let pod = Pod::start(engine, "fails", &words)?;
    let page = pod.until("/msg.html", 200)?;
    ensure!(page.body.contains("mount it as /custom.iso"), "{page:?}");
    ensure!(pod.get("/")?.body.contains("status.js"), "no page");
    thread::sleep(Duration::from_secs(10));
    let lived = start.elapsed().as_secs();
    let restarts = pod.restarts()?;
    ensure!(u64::from(restarts) <= lived / 30, "{restarts} restarts in {lived} s");
    let said = pod.logs()?;
    ensure!(said.contains("shows this for 30 s (ERROR_HOLD); then the pod ends with status 68"));
    let status = pod.stop(30)?;
    ensure!(status == 68, "{status}\n{}", pod.logs()?);
    Ok(())
}

/// Builds the image again, expects the same image, and checks its labels and its list of packages.
#[test]
fn the_same_sources_make_the_same_image() -> Result<()> {
    if !runs_here("the image") {
        return Ok(());
    }
    let engine = Engine::get()?;
    let first = engine.image()?;
    engine.build()?;
    ensure!(engine.image()? == first, "the same sources made another image");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let about = engine.about()?;
    let label = |name: &str| about["Labels"][format!("org.opencontainers.image.{name}")].as_str();
    let created = about["Created"].as_str().context("no time")?;
    ensure!(label("version") == Some(env!("CARGO_PKG_VERSION")), "{about}");
    ensure!(label("licenses") == Some("Apache-2.0"), "{about}");
    // The commit's time, in the same format.
    ensure!(label("created").is_some_and(|it| created.starts_with(it.trim_end_matches('Z'))));
    ensure!(label("title").is_some() && label("description").is_some(), "{about}");
    let lock = fs::read_to_string(root.join("Cargo.lock"))?;
    let list = engine.file("/usr/share/doc/transom/sbom.spdx.json")?;
    let list: serde_json::Value = serde_json::from_slice(&list)?;
    let packages = list["packages"].as_array().context("no packages")?;
    let named = |name: &str| packages.iter().find(|it| it["name"] == name);
    for name in ["vmm", "container", "kvm-ioctls", "tokio", "@novnc/novnc", "libc6", "ovmf"] {
        let version = named(name).with_context(|| format!("no {name}"))?["versionInfo"].as_str();
        let version = version.with_context(|| format!("{name} has no version"))?;
        let entry = format!("name = \"{name}\"\nversion = \"{version}\"");
        let ours = named(name).is_some_and(|it| it["SPDXID"].to_string().contains("-crate-"));
        ensure!(!ours || lock.contains(&entry), "{name} {version}: not in Cargo.lock");
    }
    // The list has no packages that only tests need.
    for name in ["transom-tests", "zune-jpeg"] {
        ensure!(lock.contains(name) && named(name).is_none(), "{name} is in the image's list");
    }
    let licences = String::from_utf8(engine.file("/usr/share/doc/transom/licences")?)?;
    for words in ["tokio ", "libc6 ", "Permission is hereby granted", "ovmf "] {
        ensure!(licences.contains(words), "no {words} in the licenses");
    }
    Ok(())
}

/// Pod Security level "restricted", with a read-only root file system.
#[test]
fn runs_as_a_user_without_rights() -> Result<()> {
    if !runs_here("the pod") {
        return Ok(());
    }
    let engine = Engine::get()?;
    let folder = tempfile::tempdir()?;
    // The device node of a device plugin, which this user may open.
    let node = folder.path().join("kvm");
    let number = fs::metadata("/dev/kvm")?.rdev();
    let mode = Mode::RUSR | Mode::WUSR | Mode::ROTH | Mode::WOTH;
    mknodat(CWD, &node, FileType::CharacterDevice, mode, number)?;
    fs::set_permissions(&node, fs::Permissions::from_mode(0o666))?;
    let device = format!("{}:/dev/kvm", node.display());
    let rights = ["--user", "10001:10001", "--cap-drop", "ALL", "--device", &device];
    let closed = ["--security-opt", "no-new-privileges", "--read-only", "--tmpfs", "/tmp"];
    let words = ["--env", "VERSION=probe", "--env", "NETWORK=user"];
    let words = [&rights[..], &closed, &words].concat();
    let pod = Pod::start_with(engine, "nobody", &words)?;
    pod.until("/readyz", 200)?;
    let said = pod.logs()?;
    ensure!(said.contains("user mode: the guest is 10.99.0.2"), "{said}");
    check_rights(&pod, [(10001, 0), (10001, 0), (10001, 0)])?;
    let status = pod.stop(30)?;
    ensure!(status == 143, "{status}\n{}", pod.logs()?);
    Ok(())
}

/// The guest's own interface on the pod's network. No engine passes its device through, because its
/// number is not known in advance.
#[test]
fn with_dhcp_the_guest_has_its_own_card() -> Result<()> {
    if !runs_here("the pod") {
        return Ok(());
    }
    let engine = Engine::get()?;
    let words = ["--env", "VERSION=probe", "--env", "DHCP=Y", "--device", "/dev/kvm"];
    let [admin, node, rule] =
        ["--cap-add=NET_ADMIN", "--cap-add=MKNOD", "--device-cgroup-rule=c *:* rwm"];
    for (rights, sentence) in [
        (&["--cap-drop=ALL"][..], "add --cap-add NET_ADMIN"),
        (&[admin, rule, "--cap-drop=MKNOD"], "add --cap-add MKNOD"),
        (&[admin, node], "add device_cgroup_rules: [\"c *:* rwm\"]"),
    ] {
        let pod = Pod::start_with(engine, "card", &[&words[..], rights].concat())?;
        let (ended, said) = (pod.wait()?, pod.logs()?);
        ensure!(ended == 20, "{rights:?}: {ended}: {said}");
        let last = said.lines().last().context("no line")?;
        ensure!(last.starts_with("transom: ") && last.contains(sentence), "{rights:?}: {said}");
        ensure!(!pod.interfaces()?.contains("macvtap"), "{rights:?}: the macvtap is left");
    }
    let pod = Pod::start_with(engine, "card", &[&words[..], &[admin, node, rule]].concat())?;
    pod.until("/readyz", 200)?;
    let links = pod.interfaces()?;
    let card = links.lines().find(|it| it.contains("macvtap")).context("no card")?;
    ensure!(card.contains(" qemu@eth0: ") && card.contains("mode bridge"), "{card}");
    // The machine has the device open, but its node is already deleted.
    let (_, all) = pod.processes()?;
    let machine = all.iter().find(|it| it.name == "vmm").context("no machine")?;
    let is_device = |it: &PathBuf| it.to_string_lossy().ends_with("transom-macvtap (deleted)");
    ensure!(machine.files.iter().any(is_device), "{:?}", machine.files);
    let status = pod.stop(30)?;
    ensure!(status == 143, "{status}\n{}", pod.logs()?);
    ensure!(!pod.interfaces()?.contains("macvtap"), "the macvtap is left");
    Ok(())
}

#[test]
fn each_startup_error_is_one_sentence_and_a_status() -> Result<()> {
    if !runs_here("the pod") {
        return Ok(());
    }
    let engine = Engine::get()?;
    for (words, status, sentence) in [
        (&["--env", "VERSION=tiny11"][..], 68, "mount it as /custom.iso"),
        (&["--env", "CPU_CORES=many"], 15, "CPU_CORES=many"),
        (&["--env", "VERSION=probe", "--env", "UUID=1"], 2, "UUID=1: give a UUID"),
    ] {
        let pod = Pod::start(engine, "wrong", words)?;
        let (ended, said) = (pod.wait()?, pod.logs()?);
        ensure!(ended == status, "{words:?}: {ended}: {said}");
        let last = said.lines().last().context("no line")?;
        ensure!(last.starts_with("transom: ") && last.contains(sentence), "{words:?}: {said}");
    }
    let pod = Pod::start_with(engine, "without", &["--env", "VERSION=probe"])?;
    let (ended, said) = (pod.wait()?, pod.logs()?);
    ensure!(ended == 88 && said.contains("--device /dev/kvm"), "{ended}: {said}");
    Ok(())
}

/// The reference image ignores the command of a container, too.
#[test]
fn files_are_copied_and_a_command_is_ignored() -> Result<()> {
    if let Err(why) = engine::is_here() {
        not_run("copies to the volume", why);
        return Ok(());
    }
    let engine = Engine::get()?;
    let pod = Failing::start(engine, IMAGE, &[], &["powershell", "-c", "exit"])?;
    let bytes: Vec<u8> = (0..3 << 20).map(|it: u32| it.to_le_bytes()[1]).collect();
    let copy = |words: &[&str], input: &[u8]| {
        pod.exec(&[&["/usr/bin/transom", "cp"], words].concat(), input)
    };
    let whole = bytes.len().to_string();
    let into = |size: &str, file: &str| copy(&["--size", size, "-", file], &bytes);
    ensure!(into("9999999", "/storage/custom.iso")?.0 == 1, "a part is stored");
    ensure!(into(&whole, "/storage/custom.iso")?.0 == 0, "not stored");
    ensure!(copy(&["custom.iso", "-"], &[])? == (0, bytes.clone()), "another file came back");
    ensure!(into(&whole, "custom.iso")?.0 == 1, "a file is replaced");
    ensure!(copy(&["/etc/passwd", "-"], &[])? == (1, Vec::new()), "a file of the image came back");
    ensure!(pod.exec(&["/usr/bin/transom", "powershell"], &[])?.0 == 2, "an unknown command ran");
    pod.stop()
}

#[test]
fn the_image_for_debugging_has_a_shell_and_is_built_upon() -> Result<()> {
    if let Err(why) = engine::is_here() {
        not_run("the image for debugging", why);
        return Ok(());
    }
    let engine = Engine::get()?;
    engine.build_with(&["--debug"])?;
    let folder = tempfile::tempdir()?;
    let script = "#!/bin/sh\necho prepared > /prepared\nexec /usr/bin/tini -s /run/entry.sh\n";
    fs::write(folder.path().join("start.sh"), script)?;
    let recipe = format!(
        "FROM {DEBUG_IMAGE}\nCOPY --chmod=755 start.sh /\nRUN apt-get --version && useradd built\n\
         ENTRYPOINT [\"/start.sh\"]\n"
    );
    fs::write(folder.path().join("Containerfile"), recipe)?;
    let upon = "localhost/transom-test:upon";
    let path = folder.path().display().to_string();
    let cut = ["build", "--quiet", "--ulimit", "nofile=4096:4096", "--tag", upon, &path];
    said(&mut engine.podman(&cut))?;
    let pod = Failing::start(engine, upon, &[], &[])?;
    let (status, text) =
        pod.exec(&["sh", "-c", "cat /prepared; id -un built; command -v nc"], &[])?;
    ensure!(status == 0 && text == b"prepared\nbuilt\n/usr/bin/nc\n", "{status}: {text:?}");
    // `kubectl cp` sends and takes an archive.
    let mut archive = Command::new("tar");
    archive.args(["-c", "-C", &path, "start.sh"]);
    let (status, _) =
        pod.exec(&["tar", "-xmf", "-", "-C", "/storage"], &archive.output()?.stdout)?;
    ensure!(status == 0, "{status}");
    let (status, archive) = pod.exec(&["tar", "cf", "-", "/storage/start.sh"], &[])?;
    let copied = String::from_utf8_lossy(&archive).contains(script);
    ensure!(status == 0 && copied, "{status}: no script in {} bytes", archive.len());
    pod.stop()
}

#[test]
fn the_base_has_at_most_30_mb() -> Result<()> {
    if let Err(why) = engine::is_here() {
        not_run("the sizes of the image", why);
        return Ok(());
    }
    Engine::get()?;
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/sizes");
    let work = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../image");
    // Other tests build the image again, by the same lock.
    let lock = work.with_extension("lock");
    let sizes = said(Command::new("flock").arg(lock).arg(deploy).arg(work.join("root")))?;
    say!("{}", sizes.trim().replace('\n', ", "));
    for (part, range) in [
        ("base", 10_000_000..30_000_000),
        ("TPM", 1_000_000..4_000_000),
        ("shared-folder", 50_000..500_000),
    ] {
        let line = sizes.lines().find_map(|line| line.strip_prefix(&format!("{part} ")));
        let bytes: u64 = line.with_context(|| format!("no {part}"))?.parse()?;
        ensure!(range.contains(&bytes), "{part} has {bytes} bytes, not {range:?}");
    }
    Ok(())
}

#[test]
fn the_screen_requires_the_password() -> Result<()> {
    if !runs_here("the pod") {
        return Ok(());
    }
    let engine = Engine::get()?;
    let secret = tempfile::NamedTempFile::new()?;
    fs::write(secret.path(), "a long word")?;
    let mount = format!("{}:/run/secrets/word:ro", secret.path().display());
    let words = ["VERSION=probe", "PROTECT=Y", "USERNAME=ada", "PASSWORD_FILE=/run/secrets/word"];
    let words = words.iter().flat_map(|word| ["--env", word]);
    let words: Vec<_> = words.chain(["--volume", &mount]).collect();
    let pod = Pod::start(engine, "asks", &words)?;
    pod.until("/readyz", 200)?;
    for (path, who, status) in [
        ("/", None, 303),
        ("/metrics", None, 401),
        ("/api/v1/state", Some("ada:wrong"), 401),
        ("/healthz", None, 200),
    ] {
        let answer = pod.get_as(path, who)?;
        ensure!(answer.status == status, "{path}: {answer:?}");
    }
    let answer = pod.until_as("/api/v1/state", "ada:a long word", 200)?;
    ensure!(answer.body.contains("\"machine\":{"), "{answer:?}");
    let (status, word) = pod.run(&["/usr/bin/transom", "password"])?;
    ensure!(status == 0 && word == "a long word\n", "{status}: {word}");
    let (status, said) = pod.run(&["/usr/bin/transom", "status"])?;
    ensure!(status == 0 && said.contains("\"state\": \"running\""), "{status}: {said}");
    ensure!(!pod.logs()?.contains("a long word"), "a secret is in the log");
    Ok(())
}
