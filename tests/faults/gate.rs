//! Access to a pod from outside: by which host names, with which passwords, to which files.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context as _, Result, ensure};
use transom_tests::place::{HERE, Place, SEEN, until};
use transom_tests::program::{PATIENCE, Running, said, transom};

use super::{PROBE, probe, runs_here, stops};

const ALONE: (&str, &str) = ("NETWORK", "none");

/// Sends a GET request with these headers.
fn get(place: &Place, path: &str, headers: &str) -> Result<String> {
    place.say(SEEN, &format!("GET {path} HTTP/1.1\nConnection: close\n{headers}\n\n"))
}

/// Sends a POST request with JSON.
fn post(place: &Place, path: &str, headers: &str, body: &str) -> Result<String> {
    let head = format!(
        "POST {path} HTTP/1.1\nHost: {SEEN}:8006\nConnection: close\nContent-Length: {}\n\
         Content-Type: application/json\n{headers}\n",
        body.len()
    );
    place.say(SEEN, &format!("{head}{body}"))
}

fn answers(status: u16, answer: &str) -> Result<()> {
    let line = format!("HTTP/1.1 {status} ");
    ensure!(answer.starts_with(&line), "expected status {status}: {answer}");
    Ok(())
}

#[test]
fn an_open_pod_refuses_foreign_host_names() -> Result<()> {
    if !runs_here("names of an open pod") {
        return Ok(());
    }
    let place = Place::new("names")?;
    let mut pod = probe(&place, &[ALONE, ("PROTECT", "N")])?;
    let paths = ["/", "/session", "/log", "/metrics", "/msg.html", "/events", "/nothing"];
    let calls = ["/api/v1/state", "/api/v1/screenshot", "/api/openapi.json"];
    for path in paths.into_iter().chain(calls) {
        let refused = get(&place, path, "Host: evil.example:8006")?;
        answers(403, &refused).context(path)?;
        ensure!(refused.contains("WEB_ORIGIN") && refused.contains("PROTECT=Y"), "{refused}");
    }
    for path in ["/healthz", "/startupz", "/readyz"] {
        let told = get(&place, path, "Host: evil.example:8006")?;
        answers(200, &told).context(path)?;
        ensure!(told.ends_with("\r\n\r\nok\n"), "{told}");
    }
    for host in ["10.99.0.2:8006", "nas.local:8006", "windows:8006", "localhost"] {
        answers(200, &get(&place, "/api/v1/state", &format!("Host: {host}"))?).context(host)?;
    }
    // Programs may send commands; pages of other origins may not.
    answers(200, &post(&place, "/api/v1/power", "", r#"{"action":"pause"}"#)?)?;
    answers(200, &post(&place, "/api/v1/power", "", r#"{"action":"resume"}"#)?)?;
    for mark in ["Origin: http://evil.example\n", "Sec-Fetch-Site: cross-site\n"] {
        answers(403, &post(&place, "/api/v1/power", mark, r#"{"action":"pause"}"#)?)?;
    }
    // A paused guest is resumed, because it would not see the power button.
    for action in ["pause", "shutdown"] {
        let body = format!(r#"{{"action":"{action}"}}"#);
        answers(200, &post(&place, "/api/v1/power", "", &body)?)?;
    }
    ensure!(pod.wait(PATIENCE)? == 0, "{}", pod.stdout.text());
    ensure!(pod.stdout.text().contains("it is resumed to shut down"), "{}", pod.stdout.text());
    let mut pod = probe(&place, &[ALONE, ("COMPAT", "dockur")])?;
    answers(200, &get(&place, "/api/v1/state", "Host: evil.example:8006")?)?;
    stops(&mut pod)
}

#[test]
fn a_password_protects_the_probe_too() -> Result<()> {
    if !runs_here("passwords of the probe") {
        return Ok(());
    }
    let place = Place::new("protects")?;
    let mut pod = probe(&place, &[ALONE, ("PASSWORD", "a long word")])?;
    answers(401, &get(&place, "/api/v1/state", "Host: localhost")?)?;
    stops(&mut pod)?;
    let mut pod = probe(&place, &[ALONE, ("PROTECT", "Y")])?;
    let file = place.storage().join("windows.password");
    let made = fs::read_to_string(&file)?;
    ensure!(made.len() == 16, "{made:?}");
    let mode = fs::metadata(&file)?.permissions().mode() & 0o777;
    ensure!(mode == 0o600, "others may read the password: mode {mode:o}");
    // The reference image's default, Docker:admin, is not the password.
    let ask = |basic: &str| {
        get(&place, "/api/v1/state", &format!("Host: localhost\nAuthorization: Basic {basic}"))
    };
    answers(401, &ask("RG9ja2VyOmFkbWlu")?)?;
    ensure!(!pod.stdout.text().contains("Network("), "{}", pod.stdout.text());
    pod.says("web: a wrong password, number 1 from 10.99.0.2", 1)?;
    stops(&mut pod)
}

/// A WebSocket frame of a client, with a mask of zeros.
fn frame(bytes: &[u8]) -> Vec<u8> {
    let length = u8::try_from(bytes.len()).expect("it is short");
    [&[0x82, 0x80 | length, 0, 0, 0, 0], bytes].concat()
}

/// Requests the WebSocket of the screen.
fn request_websocket(place: &Place) -> Result<TcpStream> {
    let mut browser = place.connect(SEEN, 8006)?;
    let request = format!(
        "GET /websockify HTTP/1.1\nHost: {SEEN}\nOrigin: http://{SEEN}\nConnection: Upgrade\n\
         Upgrade: websocket\nSec-WebSocket-Version: 13\nSec-WebSocket-Key: \
         dGhlIHNhbXBsZSBub25jZQ==\nSec-WebSocket-Protocol: binary\n\n"
    );
    browser.write_all(request.replace('\n', "\r\n").as_bytes())?;
    Ok(browser)
}

/// Connects by VNC without a password, and reads up to the name of the screen.
fn connect_by_vnc(place: &Place) -> Result<TcpStream> {
    let mut viewer = place.connect(SEEN, 5900)?;
    let mut greeting = [0; 12];
    viewer.read_exact(&mut greeting)?;
    viewer.write_all(&greeting)?;
    let mut kinds = [0; 2];
    viewer.read_exact(&mut kinds)?;
    ensure!(kinds == [1, 1], "{kinds:?}");
    viewer.write_all(&[1])?;
    let mut result = [0; 4];
    viewer.read_exact(&mut result)?;
    ensure!(result == [0; 4], "{result:?}");
    viewer.write_all(&[1])?;
    let mut init = [0; 24];
    viewer.read_exact(&mut init)?;
    let mut name = vec![0; init[23].into()];
    viewer.read_exact(&mut name)?;
    ensure!(name == b"Transom probe", "{}", name.escape_ascii());
    Ok(viewer)
}

#[test]
fn vnc_listens_only_if_configured_and_logs_addresses() -> Result<()> {
    if !runs_here("viewers") {
        return Ok(());
    }
    let place = Place::new("viewers")?;
    let mut pod = probe(&place, &[ALONE])?;
    ensure!(place.connect(HERE, 5900).is_err(), "VNC listens without VNC_PORT");
    stops(&mut pod)?;
    let mut pod = probe(&place, &[ALONE, ("VNC_PORT", "5900")])?;
    let viewer = connect_by_vnc(&place)?;
    pod.says("vnc: 10.99.0.2:", 1)?;
    let mut browser = request_websocket(&place)?;
    for bytes in [&b"RFB 003.008\n"[..], &[1], &[1]] {
        browser.write_all(&frame(bytes))?;
    }
    pod.says("vnc: 10.99.0.2 (web) connected, with keyboard and mouse", 1)?;
    ensure!(!pod.stdout.text().contains("process 1"), "{}", pod.stdout.text());
    drop((viewer, browser));
    stops(&mut pod)
}

#[test]
fn many_screens_do_not_exhaust_the_pods_descriptors() -> Result<()> {
    if !runs_here("many screens") {
        return Ok(());
    }
    let place = Place::new("screens")?;
    let mut pod = probe(&place, &[ALONE])?;
    let (mut there, mut refused) = (Vec::new(), 0);
    for number in 0..1100 {
        let mut browser = request_websocket(&place)?;
        let mut answer = [0; 13];
        browser.read_exact(&mut answer).context(number)?;
        match &answer {
            b"HTTP/1.1 101 " => there.push(browser),
            b"HTTP/1.1 503 " => refused += 1,
            other => anyhow::bail!("{}", other.escape_ascii()),
        }
        if number % 100 == 0 {
            answers(200, &get(&place, "/healthz", "Host: 10.99.0.2")?).context(number)?;
        }
    }
    // The server drops idle connections after a while, which frees places.
    ensure!(there.len() >= 16 && refused > 0, "{} let in, {refused} refused", there.len());
    drop(there);
    until("a free place for a viewer", || {
        let mut answer = [0; 13];
        request_websocket(&place)?.read_exact(&mut answer)?;
        Ok(&answer == b"HTTP/1.1 101 ")
    })?;
    stops(&mut pod)
}

/// Sends a wrong password by VNC. Returns 1 if the server rejects it, and 0 if the server accepts
/// it or offers no security type.
fn guess(place: &Place) -> Result<u8> {
    let mut viewer = place.connect(SEEN, 5900)?;
    let mut greeting = [0; 12];
    viewer.read_exact(&mut greeting)?;
    viewer.write_all(&greeting)?;
    let mut count = [0];
    viewer.read_exact(&mut count)?;
    if count[0] == 0 {
        return Ok(0);
    }
    viewer.read_exact(&mut [0])?;
    viewer.write_all(&[2])?;
    viewer.read_exact(&mut [0; 16])?;
    viewer.write_all(&[0; 16])?;
    let mut result = [0; 4];
    viewer.read_exact(&mut result)?;
    Ok(result[3])
}

#[test]
fn wrong_passwords_for_vnc_and_web_are_counted_together() -> Result<()> {
    if !runs_here("guesses") {
        return Ok(());
    }
    let place = Place::new("guesses")?;
    let words = [ALONE, ("PASSWORD", "a long word"), ("VNC_PORT", "5900")];
    let mut pod = probe(&place, &words)?;
    ensure!([guess(&place)?, guess(&place)?] == [1, 1], "a wrong password is accepted");
    let basic = "Host: localhost\nAuthorization: Basic RG9ja2VyOmEgbG9uZyB3b3Jk";
    until("the guesses by VNC do not count", || {
        // On a busy host, the time for which they delay the next may be over.
        guess(&place)?;
        Ok(get(&place, "/api/v1/state", basic)?.starts_with("HTTP/1.1 429 "))
    })?;
    // The loopback address is not blocked: the right password works.
    let request = format!("GET /api/v1/state HTTP/1.1\nConnection: close\n{basic}\n\n");
    answers(200, &place.say(HERE, &request)?)?;
    let vnc = fs::read_to_string(place.storage().join("windows.vnc"))?;
    ensure!(vnc.len() == 8 && !"a long word".starts_with(&vnc[..2]), "{vnc:?}");
    ensure!(!pod.stdout.text().contains(&vnc), "the password is in the log");
    stops(&mut pod)
}

#[test]
fn idle_connections_do_not_block_probes() -> Result<()> {
    if !runs_here("idle connections") {
        return Ok(());
    }
    let place = Place::new("idle")?;
    let mut pod = probe(&place, &[ALONE])?;
    let mut idle = Vec::new();
    for number in 0..300 {
        idle.push(place.connect(SEEN, 8006)?);
        if number % 30 == 0 {
            for path in ["/healthz", "/readyz", "/startupz"] {
                answers(200, &get(&place, path, "Host: 10.99.0.2")?).context(number)?;
            }
        }
    }
    answers(200, &get(&place, "/api/v1/state", "Host: 10.99.0.2")?)?;
    drop(idle);
    stops(&mut pod)
}

/// The output of `transom password` among the pod's mounts.
fn password(pod: &Running) -> Result<String> {
    let pid = pod.pid().as_raw_nonzero().to_string();
    let program = transom().display().to_string();
    let mut command = std::process::Command::new("nsenter");
    command.args(["--target", &pid, "--mount", "sh", "-c", "\"$0\" password 2>&1; true", &program]);
    said(&mut command)
}

#[test]
fn asking_an_open_pod_for_its_password_gives_the_reason() -> Result<()> {
    if !runs_here("passwords of open pods") {
        return Ok(());
    }
    let place = Place::new("open")?;
    for (word, why) in [
        (("PROTECT", "N"), "PROTECT=N"),
        (("COMPAT", "dockur"), "COMPAT=dockur"),
        (PROBE, "VERSION=probe"),
    ] {
        let mut pod = probe(&place, &[ALONE, word])?;
        let told = password(&pod)?;
        ensure!(told.contains(why) && told.lines().count() == 1, "{told}");
        stops(&mut pod)?;
    }
    let mut pod = probe(&place, &[ALONE, ("PROTECT", "Y"), ("VNC_PORT", "5900")])?;
    let told = password(&pod)?;
    let [web, vnc] = ["windows.password", "windows.vnc"].map(|it| place.storage().join(it));
    let wanted = format!("{}\nVNC: {}\n", fs::read_to_string(web)?, fs::read_to_string(vnc)?);
    ensure!(told == wanted, "{told}");
    stops(&mut pod)
}

#[test]
fn the_api_attaches_images_but_no_private_files() -> Result<()> {
    if !runs_here("files that the API attaches") {
        return Ok(());
    }
    let place = Place::new("lends")?;
    let storage = place.storage();
    let mut iso = vec![0; 64 << 10];
    iso[0x8001..0x8006].copy_from_slice(b"CD001");
    fs::write(storage.join("good.iso"), &iso)?;
    fs::write(storage.join("windows.tpm"), "nilmptws")?;
    fs::write(storage.join("data.img"), vec![0; 4096])?;
    std::os::unix::fs::symlink("windows.tpm", storage.join("link.img"))?;
    std::os::unix::fs::symlink("/etc/passwd", storage.join("far.iso"))?;
    let mut pod = probe(&place, &[ALONE])?;
    let attach = |path: &str| {
        post(&place, "/api/v1/usb", "", &format!(r#"{{"attach":{{"path":"{path}"}}}}"#))
    };
    for path in ["windows.tpm", "data.img", "link.img", "far.iso", "../etc/passwd", "windows.mac"] {
        for path in [path.to_owned(), format!("/mnt/{path}")] {
            let refused = attach(&path)?;
            answers(409, &refused)?;
            let line = refused.lines().last().unwrap_or_default();
            ensure!(line.contains(&path) && line.starts_with("{\"error\":"), "{path}: {refused}");
        }
    }
    let lent = attach("/mnt/good.iso")?;
    answers(200, &lent)?;
    let body: serde_json::Value = serde_json::from_str(lent.lines().last().unwrap_or_default())?;
    let name = body["name"].as_str().context("no name")?;
    let state = || get(&place, "/api/v1/state", "Host: localhost");
    ensure!(state()?.contains("good.iso"), "{}", state()?);
    let media = |body: String| post(&place, "/api/v1/media", "", &body);
    let eject = format!(r#"{{"drive":"{name}","force":true}}"#);
    answers(200, &media(eject)?).context("a forced ejection")?;
    answers(409, &media(format!(r#"{{"drive":"{name}","path":"/mnt/windows.tpm"}}"#))?)?;
    answers(200, &media(format!(r#"{{"drive":"{name}","path":"good.iso"}}"#))?)?;
    until("good.iso in the drive", || Ok(state()?.contains("good.iso")))?;
    stops(&mut pod)
}
