//! A pod with the user's install CD, seen in a browser.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process};
use transom_tests::desk::{Key, PASSWORD, Sitter, free_ports};
use transom_tests::lab;
use transom_tests::novnc::Page;
use transom_tests::sight::Sight;

use super::{BOOT, LAB, SIZE, SOON};

const USER: &str = "ada";

/// Colors of the installer's screen, as blue, green and red.
const BLUE: [u8; 3] = [0xaa, 0, 0];
const GREY: [u8; 3] = [0xaa; 3];

/// The pod with the CD, in the lab or on this host; dropping it ends the pod.
struct Pod(Child);

impl Pod {
    fn start(ports: [u16; 2]) -> anyhow::Result<Self> {
        let lacks = lab::lacks()?;
        let program = lab::vmm()?.with_file_name("transom");
        let cd = lab::asset("INSTALL_CD")?;
        let [vnc, web] = ports.map(|port| port.to_string());
        let settings = [
            ("VNC_PORT", vnc.as_str()),
            ("WEB_PORT", &web),
            ("USERNAME", USER),
            ("PASSWORD", PASSWORD),
            ("CPU_CORES", "1"),
            ("RAM_SIZE", "768M"),
            ("RAM_MINIMUM", "768M"),
            ("DISK_SIZE", "1G"),
            ("DISK_MINIMUM", "1G"),
            ("NETWORK", "none"),
            // It is not Windows.
            ("MANUAL", "Y"),
            ("WIDTH", "800"),
            ("HEIGHT", "600"),
        ];
        let settings: Vec<_> =
            settings.iter().map(|(name, value)| format!("{name}='{value}'")).collect();
        // In a mount namespace of its own, the CD is at the path where users mount theirs.
        let script = format!(
            "mount -t tmpfs none /mnt && mkdir /mnt/storage && touch /custom.iso && \
             mount --bind {} /custom.iso && exec env STORAGE=/mnt/storage {} {} pod",
            cd.display(),
            settings.join(" "),
            program.display()
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]);
        if lacks.is_some() {
            command = LAB.around(&command, &ports)?;
        }
        let child = command.stdin(Stdio::null()).spawn().context("the pod")?;
        Ok(Self(child))
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // SIGTERM makes the lab end its emulator.
        if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::TERM).ok();
        }
        self.0.wait().ok();
    }
}

/// Whether the pod's web port answers. In the lab, the port is open before anything listens.
fn answers(port: u16) -> anyhow::Result<bool> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(SOON))?;
    write!(stream, "GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer.starts_with("HTTP/1.") && answer.contains(" 200 "))
}

/// The pod boots the CD, because the disk is empty, and its menu reacts to keys.
pub(crate) fn is_seen_in_a_browser() -> anyhow::Result<()> {
    let ports = free_ports()?;
    let mut pod = Pod::start(ports)?;
    let end = Instant::now() + BOOT;
    while !answers(ports[1]).unwrap_or(false) {
        ensure!(pod.0.try_wait()?.is_none(), "the pod has ended");
        ensure!(Instant::now() < end, "the web port does not answer");
        sleep(Duration::from_millis(200));
    }
    let mut page = Page::open(ports[1], Some(USER))?;
    let size = format!("{}x{}", SIZE.0, SIZE.1);
    // Debian's picture behind the menu has more colors than any text.
    let is_menu = |sight: &Sight| sight.size() == size && sight.colours() > 200;
    let menu = page.until("desk-install-cd", BOOT, &mut |sight| is_menu(sight))?;
    menu.keep("desk-install-cd")?;
    // The menu's bar moves down one line, and back up.
    page.press(Key::Down)?;
    let moved = |sight: &Sight| {
        let rows = if is_menu(sight) { sight.changed(&menu) } else { Vec::new() };
        let tall = rows.last().zip(rows.first()).map_or(0, |(last, first)| last - first);
        (16..80).contains(&tall)
    };
    page.until("desk-install-cd-down", SOON, &mut |sight| moved(sight))?;
    page.press(Key::Up)?;
    let back = |sight: &Sight| is_menu(sight) && sight.changed(&menu).is_empty();
    page.until("desk-install-cd-up", SOON, &mut |sight| back(sight))?;
    if !lab::everything() {
        return Ok(());
    }
    page.press(Key::Enter)?;
    // The first question of the installer: a blue screen of few colors with a gray box.
    let asks = |sight: &Sight| {
        let [blue, grey] = [BLUE, GREY].map(|colour| sight.share(colour));
        sight.colours() < 32 && (20..80).contains(&blue) && (20..80).contains(&grey)
    };
    page.until("desk-installer", BOOT, &mut |sight| asks(sight))?.keep("desk-installer")?;
    Ok(())
}
