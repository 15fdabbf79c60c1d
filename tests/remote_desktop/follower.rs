//! The page's desktop at IronRDP's own server, which follows the window and transfers files.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tempfile::TempDir;
use transom_tests::browser::{Browser, Window};
use transom_tests::program::not_run;
use transom_tests::rdp_hosts::{self, PASSWORD, Process, USER};
use transom_tests::{lab, rdp_server};

use super::{COPIED, Pod, album, browser, connected, firefox, holds, runs_here, until};

/// More than one request of a client, and no multiple of it.
const LARGE: usize = 3_000_001;

struct Server {
    _process: Process,
    orders: ChildStdin,
    events: Arc<Mutex<Vec<String>>>,
    folder: TempDir,
}

impl Server {
    fn start(address: &str) -> Result<Self> {
        let program = rdp_server::build()?;
        let folder = tempfile::tempdir()?;
        rdp_server::make_certificate(folder.path())?;
        let log = File::create(folder.path().join("log"))?;
        let mut child = Command::new(program)
            .arg(address)
            .arg(folder.path())
            .args([USER, PASSWORD])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .context("rdp_server")?;
        let orders = child.stdin.take().context("a pipe")?;
        let lines = BufReader::new(child.stdout.take().context("a pipe")?).lines();
        let events = Arc::<Mutex<Vec<_>>>::default();
        let seen = events.clone();
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                seen.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        });
        rdp_hosts::wait_for_port(address)?;
        Ok(Self { _process: Process(child), orders, events, folder })
    }

    fn order(&mut self, order: &str) -> Result<()> {
        writeln!(self.orders, "{order}").context("an order for the server")
    }

    /// Waits for an event that has not been waited for.
    fn happens(&self, event: &str) -> Result<()> {
        let wait = until(event, || {
            let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
            let at = events.iter().position(|it| it == event);
            if let Some(at) = at {
                events.drain(..=at);
            }
            Ok(at.is_some())
        });
        wait.with_context(|| self.log())
    }

    fn log(&self) -> String {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        format!("{events:?} {log}")
    }

    fn place(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Shows the desktop of a server at this address.
fn open(browser: &mut Browser, address: &str) -> Result<(Server, Pod)> {
    let server = Server::start(address)?;
    let pod = Pod::new(address, false)?;
    pod.web.desktop.set_login(USER, PASSWORD.into());
    browser.resize(Window::desk(1200, 800))?;
    browser.go(&pod.desktop())?;
    connected(browser, || server.log())?;
    follows(browser, &server)?;
    Ok((server, pod))
}

fn is_wanted(test: &str) -> bool {
    let wanted = lab::everything();
    if !wanted {
        not_run(test, lab::THOROUGH);
    }
    wanted
}

/// Waits until desktop, canvas and window agree.
fn follows(browser: &mut Browser, server: &Server) -> Result<()> {
    // The pixels that the screen shows there, and an even number in each line.
    let wanted = "(() => { \
        const { clientWidth, clientHeight } = document.getElementById('pane'); \
        const [width, height] = [clientWidth, clientHeight].map((it) => it * devicePixelRatio); \
        return `${Math.round(width) & ~1}x${Math.round(height)}`; })()";
    let size = browser.value(wanted)?;
    let size = size.as_str().context("a size")?;
    server.happens(&format!("size {size}"))?;
    let painted = format!(
        "(() => {{ const canvas = document.getElementById('screen'); \
         const [width, height] = [canvas.width, canvas.height]; \
         if (`${{width}}x${{height}}` != '{size}') return false; \
         const pixel = canvas.getContext('2d').getImageData(width - 1, height - 1, 1, 1).data; \
         return pixel[1] > 140 && pixel[0] < 60; }})()"
    );
    holds(browser, &painted, || server.log())
}

/// The screenshots of another browser have a prefix.
fn follows_windows(browser: &mut Browser, address: &str, prefix: &str) -> Result<()> {
    let (server, _pod) = open(browser, address)?;
    browser.keep(&album(), &format!("{prefix}follower"))?;
    for (name, window) in [
        ("smaller", Window::desk(900, 701)),
        ("phone", Window::phone(390, 844)),
        ("turned phone", Window::phone(844, 390)),
        ("larger", Window::desk(1500, 1000)),
    ] {
        browser.resize(window)?;
        follows(browser, &server).with_context(|| name.to_owned())?;
        browser.keep(&album(), &format!("{prefix}follower {name}"))?;
    }
    Ok(())
}

#[test]
fn the_desktop_follows_the_window() -> Result<()> {
    let test = "the_desktop_follows_the_window";
    if !is_wanted(test) || !runs_here(test) {
        return Ok(());
    }
    let (mut browser, _folder) = browser()?;
    follows_windows(&mut browser, "127.0.0.35", "")
}

#[test]
fn the_desktop_follows_the_window_in_firefox() -> Result<()> {
    let test = "the_desktop_follows_the_window_in_firefox";
    if !is_wanted(test) || !firefox::runs_here(test) {
        return Ok(());
    }
    let (mut browser, _folder) = firefox::browser()?;
    follows_windows(&mut browser, "127.0.0.40", "firefox ")
}

/// Two files in folders, an empty one and a large one.
fn fill(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder.join("a folder/inner"))?;
    fs::write(folder.join("a folder/inner/Grüße.txt"), "in two folders")?;
    fs::write(folder.join("a folder/one.txt"), "in one folder")?;
    fs::write(folder.join("empty.dat"), "")?;
    let large: Vec<_> = (0..LARGE).map(|at| (at * 31 / 7 % 251).to_le_bytes()[0]).collect();
    fs::write(folder.join("large.bin"), large)?;
    Ok(())
}

/// The files below a folder, by their paths in it.
fn tree(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let (path, name) = {
            let entry = entry?;
            (entry.path(), entry.file_name().to_string_lossy().into_owned())
        };
        if path.is_dir() {
            files.extend(tree(&path)?.into_iter().map(|(it, data)| (format!("{name}/{it}"), data)));
        } else {
            files.insert(name, fs::read(&path)?);
        }
    }
    Ok(files)
}

#[test]
fn texts_and_files_are_copied_both_ways() -> Result<()> {
    let test = "texts_and_files_are_copied_both_ways";
    if !is_wanted(test) || !runs_here(test) {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    let (mut server, _pod) = open(&mut browser, "127.0.0.36")?;
    copy_texts(&mut server, &mut browser)?;
    let from = folder.path().join("from");
    fill(&from)?;
    drop_files(&mut browser, &from)?;
    upload(&mut server, &from)?;
    browser.keep(&album(), "uploaded")?;
    let downloads = folder.path().join("downloads");
    let allow = json!({ "behavior": "allow", "downloadPath": downloads });
    browser.order("Page.setDownloadBehavior", &allow)?;
    download(&mut server, &mut browser, &downloads)?;
    browser.keep(&album(), "downloaded")
}

#[test]
fn texts_and_files_are_copied_both_ways_in_firefox() -> Result<()> {
    let test = "texts_and_files_are_copied_both_ways_in_firefox";
    if !is_wanted(test) || !firefox::runs_here(test) {
        return Ok(());
    }
    let (mut browser, folder) = firefox::browser()?;
    let (mut server, _pod) = open(&mut browser, "127.0.0.41")?;
    copy_texts(&mut server, &mut browser)?;
    // Its protocol drops nothing on a page, and fields for files take no folders.
    let from = folder.path().join("from");
    fill(&from)?;
    fs::remove_dir_all(from.join("a folder"))?;
    let files = tree(&from)?.into_keys().map(|name| from.join(name).display().to_string());
    browser.choose("#chosen", &files.collect::<Vec<_>>())?;
    upload(&mut server, &from)?;
    browser.keep(&album(), "firefox uploaded")?;
    let downloads = folder.path().join("downloads");
    let allow = json!({ "type": "allowed", "destinationFolder": downloads });
    browser.order("browser.setDownloadBehavior", &json!({ "downloadBehavior": allow }))?;
    download(&mut server, &mut browser, &downloads)?;
    browser.keep(&album(), "firefox downloaded")
}

/// The machine pastes the files of the page.
fn upload(server: &mut Server, from: &Path) -> Result<()> {
    server.happens("offered files")?;
    server.order("paste")?;
    server.happens("pasted files")?;
    ensure!(tree(&server.place("in"))? == tree(from)?, "other files arrived: {}", server.log());
    Ok(())
}

fn copy_texts(server: &mut Server, browser: &mut Browser) -> Result<()> {
    let text = "žluťoučký from the page";
    browser.click("[popovertarget=clipboard]")?;
    browser.value(&format!("document.getElementById('text').value = {text:?}"))?;
    browser.click("#paste")?;
    server.happens("offered text")?;
    server.order("paste")?;
    server.happens(&format!("pasted {text}"))?;
    server.order(&format!("text {COPIED}"))?;
    let shown = format!("document.getElementById('text').value == {COPIED:?}");
    holds(browser, &shown, || server.log())?;
    browser.value("document.getElementById('clipboard').hidePopover()").map(|_| ())
}

/// Drags everything in a folder over the page and drops it there.
fn drop_files(browser: &mut Browser, from: &Path) -> Result<()> {
    let paths = fs::read_dir(from)?.map(|entry| Ok(entry?.path()));
    let paths: Vec<_> = paths.collect::<Result<_>>()?;
    let data = json!({ "items": [], "files": paths, "dragOperationsMask": 1 });
    for kind in ["dragEnter", "dragOver", "drop"] {
        let event = json!({ "type": kind, "x": 600, "y": 400, "data": data });
        browser.order("Input.dispatchDragEvent", &event)?;
    }
    Ok(())
}

/// The page lists the files that the machine copied. A browser has one folder for downloads.
fn download(server: &mut Server, browser: &mut Browser, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    fill(&server.place("out"))?;
    server.order("files")?;
    holds(browser, "document.querySelectorAll('#offered li').length == 4", || server.log())?;
    browser.click("[popovertarget=files]")?;
    browser.keep(&album(), "offered")?;
    browser.click("#all")?;
    let mut expected = tree(&server.place("out"))?;
    expected = expected
        .into_iter()
        .map(|(path, data)| (path.rsplit('/').next().unwrap_or_default().to_owned(), data))
        .collect();
    let loaded = until("the downloads", || Ok(tree(to)? == expected));
    let got: Vec<_> = tree(to)?.into_iter().map(|(name, data)| (name, data.len())).collect();
    loaded.with_context(|| format!("{got:?}"))
}
