//! Who may come in to a pod, by which name, and what they may have: asked from outside.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context as _, Result, ensure};
use transom_tests::program::{Running, said, transom};

use super::place::{HERE, Place, SEEN};
use super::{PROBE, probe, runs_here, stops, until};

const ALONE: (&str, &str) = ("NETWORK", "none");

/// Asks for a page with these headers.
fn get(place: &Place, path: &str, headers: &str) -> Result<String> {
    place.say(SEEN, &format!("GET {path} HTTP/1.1\nConnection: close\n{headers}\n\n"))
}

/// Sends JSON.
fn post(place: &Place, path: &str, headers: &str, body: &str) -> Result<String> {
    let head = format!(
        "POST {path} HTTP/1.1\nHost: {SEEN}:8006\nConnection: close\nContent-Length: {}\n\
         Content-Type: application/json\n{headers}\n",
        body.len()
    );
    place.say(SEEN, &format!("{head}{body}"))
}

fn answers(status: u16, answer: &str) -> Result<()> {
    ensure!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "not {status}: {answer}");
    Ok(())
}

#[test]
fn an_open_pod_shows_nothing_under_a_name_that_is_anybodys() -> Result<()> {
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
    // Programs may act, pages of others may not.
    answers(200, &post(&place, "/api/v1/power", "", r#"{"action":"pause"}"#)?)?;
    answers(200, &post(&place, "/api/v1/power", "", r#"{"action":"resume"}"#)?)?;
    for mark in ["Origin: http://evil.example\n", "Sec-Fetch-Site: cross-site\n"] {
        answers(403, &post(&place, "/api/v1/power", mark, r#"{"action":"pause"}"#)?)?;
    }
    stops(&mut pod)?;
    let mut pod = probe(&place, &[ALONE, ("COMPAT", "dockur")])?;
    answers(200, &get(&place, "/api/v1/state", "Host: evil.example:8006")?)?;
    stops(&mut pod)
}

#[test]
fn a_password_protects_whatever_runs() -> Result<()> {
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
    ensure!(fs::metadata(&file)?.permissions().mode() & 0o777 == 0o600, "others may read it");
    // Docker:admin, and what was made.
    let ask = |basic: &str| {
        get(&place, "/api/v1/state", &format!("Host: localhost\nAuthorization: Basic {basic}"))
    };
    answers(401, &ask("RG9ja2VyOmFkbWlu")?)?;
    ensure!(!pod.stdout.text().contains("Network("), "{}", pod.stdout.text());
    pod.says("web: a wrong password, number 1 from 10.99.0.2", 1)?;
    stops(&mut pod)
}

/// A WebSocket's frame of a client, whose mask changes nothing.
fn frame(bytes: &[u8]) -> Vec<u8> {
    let length = u8::try_from(bytes.len()).expect("it is short");
    [&[0x82, 0x80 | length, 0, 0, 0, 0], bytes].concat()
}

/// Asks for the WebSocket with the screen.
fn knock(place: &Place) -> Result<TcpStream> {
    let mut browser = place.connect(SEEN, 8006)?;
    let request = format!(
        "GET /websockify HTTP/1.1\nHost: {SEEN}\nOrigin: http://{SEEN}\nConnection: Upgrade\n\
         Upgrade: websocket\nSec-WebSocket-Version: 13\nSec-WebSocket-Key: \
         dGhlIHNhbXBsZSBub25jZQ==\nSec-WebSocket-Protocol: binary\n\n"
    );
    browser.write_all(request.replace('\n', "\r\n").as_bytes())?;
    Ok(browser)
}

/// Comes in by VNC where no password is asked for, up to the name of the screen.
fn look(place: &Place) -> Result<TcpStream> {
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
fn viewers_come_where_they_are_asked_to_and_are_called_by_their_address() -> Result<()> {
    if !runs_here("viewers") {
        return Ok(());
    }
    let place = Place::new("viewers")?;
    let mut pod = probe(&place, &[ALONE])?;
    ensure!(place.connect(HERE, 5900).is_err(), "nobody asked for VNC");
    stops(&mut pod)?;
    let mut pod = probe(&place, &[ALONE, ("VNC_PORT", "5900")])?;
    let viewer = look(&place)?;
    pod.says("vnc: 10.99.0.2:", 1)?;
    let mut browser = knock(&place)?;
    for bytes in [&b"RFB 003.008\n"[..], &[1], &[1]] {
        browser.write_all(&frame(bytes))?;
    }
    pod.says("vnc: 10.99.0.2 (web) connected, with keyboard and mouse", 1)?;
    ensure!(!pod.stdout.text().contains("process 1"), "{}", pod.stdout.text());
    drop((viewer, browser));
    stops(&mut pod)
}

#[test]
fn who_opens_many_screens_leaves_the_pod_its_descriptors() -> Result<()> {
    if !runs_here("many screens") {
        return Ok(());
    }
    let place = Place::new("screens")?;
    let mut pod = probe(&place, &[ALONE])?;
    let (mut there, mut refused) = (Vec::new(), 0);
    for number in 0..1100 {
        let mut browser = knock(&place)?;
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
    // Who says nothing for long leaves places for more.
    ensure!(there.len() >= 16 && refused > 0, "{} and {refused}", there.len());
    drop(there);
    until("nobody else may look", || {
        let mut answer = [0; 13];
        knock(&place)?.read_exact(&mut answer)?;
        Ok(&answer == b"HTTP/1.1 101 ")
    })?;
    stops(&mut pod)
}

/// Says a wrong password by VNC.
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
fn wrong_passwords_of_viewers_and_browsers_are_counted_together() -> Result<()> {
    if !runs_here("guesses") {
        return Ok(());
    }
    let place = Place::new("guesses")?;
    let words = [ALONE, ("PASSWORD", "a long word"), ("VNC_PORT", "5900")];
    let mut pod = probe(&place, &words)?;
    ensure!([guess(&place)?, guess(&place)?] == [1, 1], "a wrong password is right");
    let basic = "Host: localhost\nAuthorization: Basic RG9ja2VyOmEgbG9uZyB3b3Jk";
    answers(429, &get(&place, "/api/v1/state", basic)?)?;
    // Not for the loopback, where the right one is right.
    let request = format!("GET /api/v1/state HTTP/1.1\nConnection: close\n{basic}\n\n");
    answers(200, &place.say(HERE, &request)?)?;
    let vnc = fs::read_to_string(place.storage().join("windows.vnc"))?;
    ensure!(vnc.len() == 8 && !"a long word".starts_with(&vnc[..2]), "{vnc:?}");
    ensure!(!pod.stdout.text().contains(&vnc), "a secret is in the log");
    stops(&mut pod)
}

#[test]
fn who_connects_and_says_nothing_keeps_no_probe_out() -> Result<()> {
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

/// What `transom password` says in the pod's place.
fn password(pod: &Running) -> Result<String> {
    let pid = pod.pid().as_raw_nonzero().to_string();
    let program = transom().display().to_string();
    let mut command = std::process::Command::new("nsenter");
    command.args(["--target", &pid, "--mount", "sh", "-c", "\"$0\" password 2>&1; true", &program]);
    said(&mut command)
}

#[test]
fn who_asks_for_the_password_of_an_open_pod_is_told_why_there_is_none() -> Result<()> {
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
fn the_api_lends_images_and_nothing_of_the_pods_own() -> Result<()> {
    if !runs_here("what is lent") {
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
    answers(200, &media(eject)?).context("it is no CD, whose medium comes out")?;
    answers(409, &media(format!(r#"{{"drive":"{name}","path":"/mnt/windows.tpm"}}"#))?)?;
    answers(200, &media(format!(r#"{{"drive":"{name}","path":"good.iso"}}"#))?)?;
    until("it is not in", || Ok(state()?.contains("good.iso")))?;
    stops(&mut pod)
}
