//! The screen behind nginx: below a path, with plain HTTP and with TLS that ends at the proxy.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Instant;
use std::{env, thread};

use anyhow::{Context, Result, ensure};
use transom_tests::program::{PATIENCE, Running, connect, not_run};
use vmm::control;

use crate::door::{PAIRS, log_in, replace_pair};
use crate::{CONNECTED, album, browser, machine, reads, ready, runs_here};

/// The proxy settings that docs/vmm.md recommends, with folders of this test.
const RULES: &str = "
daemon off;
pid {FOLDER}/pid;
error_log stderr;
events {}
http {
  access_log off;
  client_body_temp_path {FOLDER}/body;
  proxy_temp_path {FOLDER}/proxy;
  fastcgi_temp_path {FOLDER}/fastcgi;
  uwsgi_temp_path {FOLDER}/uwsgi;
  scgi_temp_path {FOLDER}/scgi;
  proxy_http_version 1.1;
  proxy_set_header Host $http_host;
  proxy_set_header Upgrade $http_upgrade;
  proxy_set_header Connection upgrade;
  proxy_set_header X-Forwarded-For $remote_addr;
  proxy_set_header X-Forwarded-Proto $scheme;
  server {
    listen 127.0.0.1:{PLAIN};
    location /vm/one/ { proxy_pass {OPEN}; }
  }
  server {
    listen 127.0.0.1:{SECURE} ssl;
    ssl_certificate {PAIR};
    ssl_certificate_key {PAIR};
    location /vm/two/ { proxy_pass http://unix:{LOCKED}:/; }
    location / { proxy_pass {OPEN}; }
  }
}
";

/// nginx, searched in `sbin` too, which is not in every user's path.
fn nginx() -> Command {
    let mut command = Command::new("nginx");
    let path = env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}

/// A free port.
fn port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Starts a proxy in front of both machines; returns its plain and its TLS port.
fn proxy(folder: &Path, open: &str, locked: &Path) -> Result<(Running, [u16; 2])> {
    let (ports, rules) = ([port()?, port()?], folder.join("nginx.conf"));
    let text = RULES
        .replace("{FOLDER}", &folder.display().to_string())
        .replace("{PLAIN}", &ports[0].to_string())
        .replace("{SECURE}", &ports[1].to_string())
        .replace("{OPEN}", open)
        .replace("{LOCKED}", &locked.display().to_string())
        .replace("{PAIR}", &replace_pair(folder, PAIRS[0])?);
    fs::write(&rules, text)?;
    let mut command = nginx();
    command.args(["-e", "stderr", "-p"]).arg(folder).arg("-c").arg(&rules);
    let proxy = Running::spawn(command.args(["-g", "master_process off;"]))?;
    let deadline = Instant::now() + PATIENCE;
    while ports.iter().any(|port| TcpStream::connect(("127.0.0.1", *port)).is_err()) {
        ensure!(Instant::now() < deadline, "{}", proxy.stderr.text());
        thread::sleep(std::time::Duration::from_millis(10));
    }
    Ok((proxy, ports))
}

/// Whether this host has a browser and nginx; otherwise the test is reported as not run.
fn runs_with_nginx(test: &str) -> bool {
    if !runs_here(test) {
        return false;
    }
    let there = nginx().arg("-v").output().is_ok();
    if !there {
        not_run(test, "there is no nginx");
    }
    there
}

#[test]
fn works_below_a_path_behind_a_proxy_with_and_without_tls() -> Result<()> {
    let test = "works_below_a_path_behind_a_proxy_with_and_without_tls";
    if !runs_with_nginx(test) {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    let folder = folder.path();
    let (password, socket) = (folder.join("password"), folder.join("web"));
    fs::write(&password, "secret\n")?;
    let control = folder.join("control");
    let (_open, address) = machine("127.0.0.1:0", &[])?;
    let locked = format!("unix:{},password={}", socket.display(), password.display());
    let (_locked, _) = machine(&locked, &["--control", &control.display().to_string()])?;
    let (_proxy, [plain, secure]) = proxy(folder, &address, &socket)?;
    browser.go(&format!("http://127.0.0.1:{plain}/vm/one/"))?;
    ready(&mut browser)?;
    browser.press("a", "KeyA", 65)?;
    reads(&mut browser, "Text", "a_")?;
    // TLS ends at the proxy; the server behind it still sets a secure cookie.
    let path = format!("https://localhost:{secure}/vm/two/");
    browser.go(&path)?;
    log_in(&mut browser, "wrong")?;
    browser.until("document.querySelector('.wrong').textContent == 'The password is wrong.'")?;
    log_in(&mut browser, "secret")?;
    browser.until(CONNECTED)?;
    ready(&mut browser)?;
    browser.press("b", "KeyB", 66)?;
    reads(&mut browser, "Text", "b_")?;
    browser.keep(&album(), "behind-a-proxy")?;
    let cookies = browser.order("Network.getCookies", &serde_json::json!({ "urls": [path] }))?;
    let cookie = &cookies["cookies"][0];
    ensure!(cookie["secure"] == true && cookie["path"] == "/vm/two", "{cookies}");
    let status = connect(&control)?.ask(&control::Command::Status)?;
    let peer = status["viewers"][0]["peer"].as_str().context("a viewer")?;
    ensure!(peer == "127.0.0.1 (web)", "the peer is not the proxy's client: {peer}");
    browser.click("#out button")?;
    browser.until("location.pathname == '/vm/two/login'")
}

#[test]
fn an_open_screen_works_behind_an_unlisted_tls_proxy() -> Result<()> {
    let test = "an_open_screen_works_behind_an_unlisted_tls_proxy";
    if !runs_with_nginx(test) {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    let (_open, address) = machine("127.0.0.1:0,auth=none", &[])?;
    let (_proxy, [plain, secure]) = proxy(folder.path(), &address, Path::new("/nowhere"))?;
    browser.go(&format!("http://vm.example:{plain}/vm/one/"))?;
    browser.until("document.body.textContent.includes('could be another site')")?;
    // Not all browsers send `Sec-Fetch-Site` with a WebSocket, and this one does not.
    browser.go(&format!("https://vm.example:{secure}/"))?;
    browser.until(CONNECTED)?;
    ready(&mut browser)
}
