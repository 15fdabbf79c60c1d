//! The remote desktop of a pod with a Linux guest, in a browser: its size, text, sound, the console
//! and back, and a new start of the pod.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::Value;
use tempfile::TempDir;
use transom_tests::browser::{Browser, Window};
use transom_tests::desk::PASSWORD;
use transom_tests::guest::Guest;
use transom_tests::linux::Linux;
use transom_tests::program::said;
use transom_tests::{lab, rdp_server, say};

use crate::BOOT;
use crate::pod::{Pod, USER};

const DESKTOP: &str = "document.body.dataset.state == 'connected' && \
    location.pathname.endsWith('/desktop')";
const PLAYER: &str = "/usr/bin/aplay";
const CONFIGURATION: &str = "/usr/share/alsa";
/// The codec's driver precedes the controller's, which looks for it.
const MODULES: [&str; 7] = [
    "virtio_pci",
    "virtio_net",
    "button",
    "evdev",
    "snd-hda-codec-generic",
    "snd-hda-intel",
    "virtio_scsi",
];
/// Frames of sound that are heard: a second.
const HEARD: u64 = 48_000;

/// The guest: an address by DHCP, a tone that does not end, a server that answers a text with
/// another one, and its power button.
const GUEST: &str = r#"
cat > /lease.sh << 'END'
#!/bin/sh
[ "$1" != deconfig ] || ip link set "$interface" up
[ "$1" != bound ] || ip addr add "$ip/$mask" dev "$interface"
[ "$1" != bound ] || ip route add default via "$router"
END
chmod 755 /lease.sh
mkdir -p /tmp /etc
ip link set lo up
udhcpc -f -q -n -t 30 -T 2 -i eth0 -s /lease.sh
yes tone | head -c 960000 > /tone
(while :; do aplay -q -D hw:0,0 -t raw -f S16_LE -r 48000 -c 2 /tone || sleep 1; done) &
mkfifo /orders
exec 3<> /orders
rdp_server 0.0.0.0 / USER 'PASSWORD' <&3 | while read -r event; do
  echo "the desktop: $event"
  case $event in
    'offered text') echo paste >&3 ;;
    'pasted '*) echo "text the guest read ${event#pasted }" >&3 ;;
  esac
done &
for device in /sys/class/input/event*; do
  [ "$(cat "$device/device/name")" = "Power Button" ] || continue
  echo "the guest serves"
  head -c 24 < "/dev/input/${device##*/}" > /dev/null
  poweroff -f
done
"#;

/// The pod's disk: that of the lab's guests for pods, with another kernel and initial RAM disk.
fn make_disk(disk: &Path) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    rdp_server::make_certificate(folder.path())?;
    let server = rdp_server::build()?;
    let script = GUEST.replace("USER", USER).replace("PASSWORD", PASSWORD);
    let mut linux = Linux::new(Guest::transom(), &lab::asset("BZIMAGE_GENERIC_13")?)
        .modules(&lab::asset("MODULES_GENERIC_13")?, &MODULES)
        .program(PLAYER)?
        .program(&server.display().to_string())?
        .add(&server, "/bin/rdp_server")
        .add(Path::new(CONFIGURATION), CONFIGURATION)
        .first(&script);
    for name in ["cert.pem", "key.pem"] {
        linux = linux.file(name, &fs::read_to_string(folder.path().join(name))?);
    }
    let files = [(lab::asset("BZIMAGE_GENERIC_13")?, "::/linux"), (linux.initrd()?, "::/initrd")];
    fs::copy(lab::asset("POD_DISK")?, disk)?;
    let partition = format!("{}@@1M", disk.display());
    for (from, to) in files {
        said(Command::new("mcopy").args(["-o", "-i", &partition]).arg(from).arg(to))?;
    }
    Ok(())
}

/// A browser that shows a pod.
struct Visit {
    browser: Browser,
    _profile: TempDir,
}

impl Visit {
    fn until(&mut self, what: &str) -> anyhow::Result<()> {
        let end = Instant::now() + BOOT;
        // A page that is about to be replaced has no body.
        while self.browser.value(what).ok() != Some(Value::Bool(true)) {
            if Instant::now() > end {
                let said = self.browser.value("[location.href, document.body.innerText]")?;
                self.keep("failed")?;
                anyhow::bail!("`{what}` never held: {said}");
            }
            sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    fn keep(&mut self, name: &str) -> anyhow::Result<()> {
        self.browser.keep(&lab::temporary()?.join("desktop"), name)
    }

    /// Opens the console, logs in, and goes to the desktop as soon as it is offered.
    fn open(pod: &Pod) -> anyhow::Result<Self> {
        let profile = tempfile::tempdir()?;
        let browser = Browser::new(&profile.path().join("profile")).context("chromium")?;
        let mut visit = Self { browser, _profile: profile };
        visit.browser.resize(Window::desk(1000, 700))?;
        visit.browser.go(&format!("http://127.0.0.1:{}/", pod.web))?;
        visit.until("document.querySelector('.login form') != null")?;
        visit.browser.log_in(USER, PASSWORD)?;
        visit.until("document.getElementById('desktop')?.hidden === false")?;
        visit.browser.click("#desktop")?;
        visit.until(DESKTOP)?;
        Ok(visit)
    }

    /// Waits until the guest's desktop has the size of the window, and its color.
    fn follows(&mut self, window: Window) -> anyhow::Result<()> {
        self.browser.resize(window)?;
        self.until(
            "(() => { const canvas = document.getElementById('screen'); \
             const { clientWidth, clientHeight } = document.getElementById('pane'); \
             const { width, height } = canvas; \
             const pixels = (length) => Math.round(length * devicePixelRatio); \
             if (width !== (pixels(clientWidth) & ~1)) return false; \
             if (height !== pixels(clientHeight)) return false; \
             const at = canvas.getContext('2d').getImageData(width - 1, height - 1, 1, 1).data; \
             return at[1] > 140 && at[0] < 60; })()",
        )
    }

    fn copies(&mut self) -> anyhow::Result<()> {
        self.browser.click("[popovertarget=clipboard]")?;
        self.browser.value("document.getElementById('text').value = 'žluťoučký'")?;
        self.browser.click("#paste")?;
        self.until("document.getElementById('text').value == 'the guest read žluťoučký'")?;
        self.browser.value("document.getElementById('clipboard').hidePopover()").map(drop)
    }

    fn hears(&mut self) -> anyhow::Result<()> {
        self.until("!document.getElementById('sound').hidden")?;
        self.browser.click("#sound")?;
        let heard = format!("Number(document.getElementById('sound').dataset.frames) > {HEARD}");
        self.until(&heard)?;
        self.browser.click("#sound")
    }
}

pub(crate) fn is_used() -> anyhow::Result<()> {
    let again = lab::shared()?.join(format!("again-{}", std::process::id()));
    let disk = lab::shared()?.join(format!("desktop-{}.img", std::process::id()));
    make_disk(&disk)?;
    let prepare = format!("cp --sparse=always {} /mnt/storage/data.img", disk.display());
    // The second pod begins when the first one has ended.
    let run = format!(
        "{{ (pod) & until [ -e {} ]; do sleep 0.5; done; kill $!; wait $!; pod; }}",
        again.display()
    );
    let words = [("NETWORK", "user"), ("AUDIO", "Y"), ("DISK_TYPE", "scsi"), ("TIMEOUT", "60")];
    let result = (|| {
        let pod = Pod::start(&words, &prepare, &run)?;
        let mut visit = Visit::open(&pod)?;
        let start = Instant::now();
        visit.follows(Window::desk(1000, 700)).context("the first size")?;
        visit.keep("session")?;
        visit.follows(Window::desk(860, 620)).context("a smaller size")?;
        visit.follows(Window::phone(390, 700)).context("a phone")?;
        visit.keep("session on a phone")?;
        visit.follows(Window::desk(1000, 700)).context("a desk again")?;
        visit.copies().context("text")?;
        visit.hears().context("sound")?;
        visit.browser.click("#console")?;
        visit.until("document.getElementById('desktop')?.hidden === false")?;
        visit.keep("console")?;
        visit.browser.click("#desktop")?;
        visit.until(DESKTOP).context("the way back")?;
        say!("used for {:.0} s", start.elapsed().as_secs_f64());
        let start = Instant::now();
        fs::write(&again, "")?;
        visit.until("document.body.dataset.state != 'connected'").context("the end")?;
        visit.keep("session away")?;
        // Nobody does anything: the other pod knows the login.
        visit.until(DESKTOP).context("the desktop after another start")?;
        visit.follows(Window::desk(1000, 700)).context("the size after another start")?;
        say!("there again after {:.0} s", start.elapsed().as_secs_f64());
        Ok(())
    })();
    for file in [again, disk] {
        fs::remove_file(file).ok();
    }
    result
}
