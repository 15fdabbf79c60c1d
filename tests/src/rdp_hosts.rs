//! RDP servers that nobody here wrote.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::rdp_server::make_certificate;
use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

pub const USER: &str = "Docker";
pub const PASSWORD: &str = "Desk-1 top";
/// The account for NTLM, as `winpr-hash` writes it.
const SAM: &str = "Docker:::3d6e349966019cfc340e183058cb220a:::\n";
/// The programs of the servers, and of the people at them.
const PROGRAMS: [&str; 7] =
    ["Xorg", "Xvfb", "freerdp-shadow-cli", "openssl", "xclip", "xrdp", "xterm"];
const PATIENCE: Duration = Duration::from_secs(30);

/// The first program that is missing.
pub fn missing() -> Option<&'static str> {
    let is_here = |name: &&str| {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&folders).any(|folder| folder.join(name).exists())
    };
    PROGRAMS.iter().find(|name| !is_here(name)).copied()
}

/// A process that ends with the test.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// An X server and a terminal, which writes what is typed to a file.
struct Desktop {
    server: Process,
    _terminal: Process,
    display: String,
}

impl Desktop {
    /// Starts this X server, which reports its display.
    fn start(mut server: Command, folder: &Path) -> Result<Self> {
        server.args(["-displayfd", "1", "-nolisten", "tcp"]).stdout(Stdio::piped());
        let mut server = server.stderr(Stdio::null()).spawn().context("an X server")?;
        let mut line = String::new();
        BufReader::new(server.stdout.take().context("a pipe")?).read_line(&mut line)?;
        let server = Process(server);
        ensure!(!line.trim().is_empty(), "the X server has no display");
        let display = format!(":{}", line.trim());
        let mut terminal = at(&display, "xterm");
        terminal.args(["-geometry", "80x24+100+100", "-e"]);
        terminal.arg(format!("cat > {}", folder.join("typed").display()));
        let terminal = Process(terminal.spawn().context("xterm")?);
        // Keys that are typed before would be lost.
        let deadline = Instant::now() + PATIENCE;
        while !folder.join("typed").exists() {
            ensure!(Instant::now() < deadline, "xterm does not start");
            sleep(Duration::from_millis(50));
        }
        Ok(Self { server, _terminal: terminal, display })
    }
}

/// A program on this display.
fn at(display: &str, name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("DISPLAY", display).stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::null());
    command
}

pub fn wait_for_port(address: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while TcpStream::connect((address, 3389)).is_err() {
        ensure!(Instant::now() < deadline, "no server listens at {address}");
        sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// FreeRDP's shadow server, which shares a desktop and asks for NLA.
pub struct Shadow {
    _server: Process,
    _desktop: Desktop,
    folder: TempDir,
}

impl Shadow {
    pub fn start(address: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut display = Command::new("Xvfb");
        display.args(["-screen", "0", "1024x768x24"]);
        let desktop = Desktop::start(display, folder.path())?;
        let sam = folder.path().join("sam");
        fs::write(&sam, SAM)?;
        let log = File::create(folder.path().join("log"))?;
        let server = at(&desktop.display, "freerdp-shadow-cli")
            .arg(format!("/bind-address:{address}"))
            .args(["/port:3389", "/sec:nla"])
            .arg(format!("/sam-file:{}", sam.display()))
            // Its key and certificate are there.
            .env("HOME", folder.path())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("freerdp-shadow-cli")?;
        let server = Process(server);
        wait_for_port(address)?;
        Ok(Self { _server: server, _desktop: desktop, folder })
    }

    /// The lines that were typed into the terminal.
    pub fn typed(&self) -> String {
        fs::read_to_string(self.file("typed")).unwrap_or_default()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.file("log")).unwrap_or_default()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// xrdp with an X server of its own: it has a clipboard, and follows the size of its client.
pub struct Xrdp {
    server: Process,
    channels: Process,
    desktop: Desktop,
    folder: TempDir,
}

impl Xrdp {
    pub fn start(address: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = folder.path();
        let mut display = Command::new("Xorg");
        display.args(["-config", "/etc/X11/xrdp/xorg.conf", "-noreset", "-logfile"]);
        display.arg(path.join("xorg.log"));
        for (name, value) in [("WIDTH", "1024"), ("HEIGHT", "768")] {
            display.env(format!("XRDP_START_{name}"), value);
        }
        display.env("XRDP_SOCKET_PATH", path);
        let desktop = Desktop::start(display, path)?;
        fs::create_dir_all("/run/xrdp/sockdir")?;
        let mut channels = at(&desktop.display, "xrdp-chansrv");
        let channels = channels.env("HOME", path).spawn().context("xrdp-chansrv")?;
        let channels = Process(channels);
        make_certificate(path)?;
        let number = desktop.display.trim_start_matches(':');
        let place = path.display();
        let settings = format!(
            "[Globals]\nini_version=1\nfork=false\nport=tcp://{address}:3389\n\
             security_layer=tls\ncertificate={place}/cert.pem\nkey_file={place}/key.pem\n\
             ssl_protocols=TLSv1.2, TLSv1.3\nautorun=desk\nhidelogwindow=true\n\
             allow_channels=true\nmax_bpp=32\nnew_cursors=true\nuse_fastpath=both\n\
             [Logging]\nLogFile={place}/log\nLogLevel=DEBUG\nEnableSyslog=false\n\
             [Channels]\ncliprdr=true\ndrdynvc=true\n\
             [desk]\nname=desk\nlib=libxup.so\nip=127.0.0.1\nusername=na\npassword=na\n\
             port={place}/xrdp_display_{number}\nchansrvport=DISPLAY({number})\ncode=20\n"
        );
        fs::write(path.join("xrdp.ini"), settings)?;
        let mut server = Command::new("xrdp");
        server.arg("--nodaemon").arg("--config").arg(path.join("xrdp.ini"));
        server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let server = Process(server.spawn().context("xrdp")?);
        wait_for_port(address)?;
        Ok(Self { server, channels, desktop, folder })
    }

    /// The display of its X server.
    pub fn display(&self) -> &str {
        &self.desktop.display
    }

    /// The processes of the desktop and its server.
    pub fn processes(&self) -> Vec<u32> {
        [&self.server, &self.channels, &self.desktop.server].map(|it| it.0.id()).into()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Copies a text in the guest. The returned process has it.
    pub fn copy(&self, text: &str) -> Result<impl Sized> {
        let file = self.folder.path().join("copied");
        fs::write(&file, text)?;
        let mut copy = at(&self.desktop.display, "xclip");
        copy.args(["-selection", "clipboard", "-quiet"]).arg(file);
        Ok(Process(copy.spawn().context("xclip")?))
    }

    /// The text that a paste in the guest gets.
    pub fn paste(&self) -> Result<String> {
        let mut paste = at(&self.desktop.display, "timeout");
        paste.args(["5", "xclip", "-selection", "clipboard", "-o", "-t", "UTF8_STRING"]);
        let pasted = paste.stdout(Stdio::piped()).output().context("xclip")?;
        Ok(String::from_utf8_lossy(&pasted.stdout).into_owned())
    }

    /// The size of the desktop, as programs of the guest see it.
    pub fn size(&self) -> Result<String> {
        let mut ask = at(&self.desktop.display, "xrandr");
        let said = ask.stdout(Stdio::piped()).output().context("xrandr")?;
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let current = text.split_once("current ").and_then(|it| it.1.split_once(','));
        Ok(current.context("no size")?.0.replace(' ', ""))
    }
}
