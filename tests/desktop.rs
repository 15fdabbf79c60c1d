//! Guests as people use them, with a screen, a keyboard and a pointer: stock firmware and Linux,
//! through TigerVNC's viewer and through the page in a browser. The tests use no other channel and
//! read the screen's text from its pixels.
#![forbid(unsafe_code)]

#[path = "desktop/follow.rs"]
mod follow;
#[path = "desktop/install.rs"]
mod install;
#[path = "desktop/pod.rs"]
mod pod;
#[path = "desktop/session.rs"]
mod session;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, ensure};
use transom_tests::desk::{Desk, Key, Sitter};
use transom_tests::guest::Guest;
use transom_tests::lab::{self, Lab};
use transom_tests::linux::Linux;
use transom_tests::novnc::Page;
use transom_tests::say;
use transom_tests::sight::{Font, Glyph, Sight, UNKNOWN, last};
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi;
use transom_tests::viewer::Viewer;

/// Long enough for firmware in the lab on a busy machine.
const BOOT: Duration = Duration::from_secs(240);
/// The limit for the effect of a key.
const SOON: Duration = Duration::from_secs(60);

const LAB: Lab = Lab { mib: 2560, seconds: 900, assets: &[] };
/// The size of the guest's screen. It is small, because an emulated processor draws slowly.
const SIZE: (u32, u32) = (800, 600);

fn main() -> ExitCode {
    let firmware = |release: &'static str| {
        let name = format!("ovmf_{release}_is_used_through_a_viewer_and_a_browser");
        Test::new(name, move || firmware_is_used(release))
    };
    let name = "linux_is_used_through_a_viewer_and_a_browser";
    let cd = "an_install_cd_is_seen_through_the_pod";
    let window = "firmware_and_linux_follow_the_window";
    let tests = vec![
        Test::new(name, linux_is_used),
        // The suite `rehearsal` reads the screen of an installation.
        Test::new(cd, install::is_seen_in_a_browser).thorough(),
        Test::new(window, follow::firmware_and_linux_follow_the_window),
        // The suite `remote_desktop` has the page and servers without a machine.
        Test::new("the_remote_desktop_of_a_pod_is_used", session::is_used).thorough(),
        firmware("13").thorough(),
        firmware("12").thorough(),
    ];
    Suite { lab: LAB, tests }.main_outside()
}

/// A machine with a display and a USB keyboard and tablet.
fn guest() -> Guest {
    let devices = ["xhci", "usb-keyboard", "usb-tablet"];
    let size = format!("{}x{}", SIZE.0, SIZE.1);
    devices.iter().fold(Guest::transom().display(&size), |it, kind| it.word("--device").word(*kind))
}

/// The letters to learn. They have no meaning to the shell, and each occurs once.
const LETTERS: [&str; 4] =
    ["abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789", ".,()-:/_[]<"];
const PROMPT: &str = "Shell> ";
/// Letters that are typed at once. EDK2 queues 32 entries for a USB keyboard, drops the oldest when
/// the queue is full, and needs two entries for a capital; its shell is slow to draw.
const AT_ONCE: usize = 8;

/// Whether a row is `Shell> ` and the cursor, judged by the pattern of equal glyphs because no
/// letter is known yet.
fn is_prompt(row: &[Glyph]) -> bool {
    let [letters @ .., blank, cursor] = row else { return false };
    let [s, h, e, first, second, more] = letters else { return false };
    let different = [s, h, e, first, more, cursor];
    let alone = |it: &&Glyph| different.iter().filter(|other| other == &it).count() == 1;
    blank.is_blank() && first == second && different.iter().all(alone)
}

/// Waits until the last row of the screen satisfies a condition.
fn until_last(
    sitter: &mut dyn Sitter,
    font: &Font,
    name: &str,
    within: Duration,
    is: impl Fn(&[Glyph]) -> bool,
) -> anyhow::Result<Vec<Glyph>> {
    let found = |sight: &Sight| last(&font.rows(sight)).is_ok_and(|(_, row)| is(row));
    let sight = sitter.until(name, within, &mut |sight| found(sight))?;
    Ok(last(&font.rows(&sight))?.1.to_vec())
}

/// Types all letters at the shell's prompt, to learn their glyphs.
fn learn(sitter: &mut dyn Sitter) -> anyhow::Result<Font> {
    let mut font = Font::of_firmware();
    let row = until_last(sitter, &font, "desk-prompt", BOOT, is_prompt)?;
    font.learn(&row[..row.len() - 1], PROMPT)?;
    let mut typed = PROMPT.to_owned();
    for letters in LETTERS.iter().flat_map(|it| it.as_bytes().chunks(AT_ONCE)) {
        let letters = str::from_utf8(letters)?;
        sitter.type_text(letters)?;
        typed.push_str(letters);
        let wanted = typed.len() + 1;
        let row = until_last(sitter, &font, "desk-letters", SOON, |row| row.len() == wanted)?;
        font.learn(&row[..typed.len()], &typed)?;
    }
    Ok(font)
}

/// Waits until the screen shows all words, and returns its text.
fn until_read(
    sitter: &mut dyn Sitter,
    font: &Font,
    words: &[&str],
    within: Duration,
) -> anyhow::Result<String> {
    let has = |sight: &Sight| {
        let text = font.read(sight).join("\n");
        words.iter().all(|it| text.contains(it))
    };
    let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    let name = format!("desk-{}", words.join("-")).chars().map(plain).collect::<String>();
    let sight = sitter.until(&name, within, &mut |sight| has(sight))?;
    sight.keep(&name)?;
    Ok(font.read(&sight).join("\n"))
}

fn firmware_is_used(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let vars = uefi::store(&lab::asset(&format!("OVMF_VARS_{release}"))?, folder.path())?;
    let code = lab::asset(&format!("OVMF_CODE_{release}"))?;
    let mut desk = Desk::start(&LAB, guest().memory("256M").firmware(code, vars), BOOT)?;
    let mut viewer = Viewer::new(desk.vnc, &[])?;
    viewer.look_at(SIZE.0, SIZE.1);
    let font = learn(&mut viewer).with_context(|| desk.running.stderr())?;
    say!("{} letters are known", font.known());
    // The line is no command: the shell's error message consists of letters that were just learned.
    viewer.press(Key::Enter)?;
    let prompt = format!("{PROMPT}{UNKNOWN}");
    until_read(&mut viewer, &font, &["is not recognized as", &format!("\n{prompt}")], SOON)?;
    answers(&mut viewer, &font, "ver", &mut desk)?;
    // Firmware has no driver for pointers: a click does nothing, and keys still work.
    viewer.click(400, 300)?;
    let mut page = Page::new(desk.web)?;
    answers(&mut page, &font, "ver", &mut desk)?;
    // Debian 12's firmware saves no resolution, under QEMU either: "Submit Fail For Form".
    let (width, height) = if release == "12" { SIZE } else { (640, 480) };
    set_up(&mut page, &font, (width, height) != SIZE)?;
    // The viewer that stayed connected shows the same, in the new size.
    viewer.look_at(width, height);
    until_last(&mut viewer, &font, "desk-again", BOOT, is_prompt)?;
    let size = format!("{width}x{height}");
    let sight = page.until("desk-again-page", SOON, &mut |it| it.size() == size)?;
    sight.keep("desk-again-page")?;
    viewer.type_text("reset -s")?;
    viewer.press(Key::Enter)?;
    desk.running.ends_with(0, SOON)
}

/// Runs a command of the shell, and compares the screen with the output on the serial port.
fn answers(
    sitter: &mut dyn Sitter,
    font: &Font,
    command: &str,
    desk: &mut Desk,
) -> anyhow::Result<()> {
    sitter.type_text("cls")?;
    sitter.press(Key::Enter)?;
    let top = |sight: &Sight| font.read(sight).first().is_some_and(|it| it.starts_with(PROMPT));
    sitter.until("desk-cls", SOON, &mut |sight| top(sight))?;
    desk.running.console().forget();
    sitter.type_text(command)?;
    sitter.press(Key::Enter)?;
    let text = until_read(sitter, font, &["EDK II, 0x00010000)\nShell> "], SOON)?;
    let lines: Vec<_> = text.lines().collect();
    ensure!(lines[0] == format!("{PROMPT}{command}"), "typed {command}: {text}");
    ensure!(lines[1].starts_with("UEFI Interactive Shell v2."), "{command}: {text}");
    ensure!(lines[2] == "EDK II" && lines[3].starts_with("UEFI v2."), "{command}: {text}");
    let said = desk.running.expect("0x00010000)", SOON)? + "0x00010000)";
    for line in &lines[1..4] {
        ensure!(said.contains(line), "the screen shows {line:?}, the serial port {said}");
    }
    say!("`{command}` on the screen: {}", lines[1..4].join("; "));
    Ok(())
}

/// The background of a menu's selected entry: black.
const SELECTED: [u8; 3] = [0; 3];
/// The last rows of the screen, which explain the keys.
const HELP_ROWS: usize = 7;

fn selected(font: &Font, sight: &Sight) -> String {
    let rows = font.read_on(sight, SELECTED);
    rows[..rows.len().saturating_sub(HELP_ROWS)].concat()
}

/// Selects an entry of a menu with the arrow key, and opens it.
fn enter(sitter: &mut dyn Sitter, font: &Font, entry: &str) -> anyhow::Result<()> {
    let mut at = selected(font, &sitter.see()?);
    for _ in 0..20 {
        if at == entry {
            return sitter.press(Key::Enter);
        }
        sitter.press(Key::Down)?;
        let (mut now, before) = (at.clone(), at);
        // Another entry, and completely drawn.
        sitter.until("desk-menu", SOON, &mut |sight| {
            let last = std::mem::replace(&mut now, selected(font, sight));
            now == last && !now.is_empty() && now != before
        })?;
        at = now;
    }
    let kept = sitter.see()?.keep("desk-menu")?;
    anyhow::bail!("no {entry:?} in this menu; the picture is in {kept}")
}

/// Leaves the shell for the setup screen, chooses another resolution if the firmware can save one,
/// and resets the machine.
fn set_up(sitter: &mut dyn Sitter, font: &Font, prefers: bool) -> anyhow::Result<()> {
    sitter.type_text("exit")?;
    sitter.press(Key::Enter)?;
    let front = ["Select Language", "<Standard English>", "256 MB RAM", "Boot Manager"];
    until_read(sitter, font, &front, SOON)?;
    enter(sitter, font, "Device Manager")?;
    until_read(sitter, font, &["Devices List", "Press ESC to exit"], SOON)?;
    let platform = "OVMF Platform Configuration";
    enter(sitter, font, platform)?;
    until_read(sitter, font, &["OVMF Settings", "<800x600>", "Commit Changes"], SOON)?;
    if prefers {
        prefer(sitter, font)?;
        enter(sitter, font, platform)?;
        // The choice is also saved for the next boot.
        until_read(sitter, font, &["OVMF Settings", "Next     640x480"], SOON)?;
    }
    sitter.press(Key::Escape)?;
    until_read(sitter, font, &["Devices List", "Press ESC to exit"], SOON)?;
    sitter.press(Key::Escape)?;
    until_read(sitter, font, &front, SOON)?;
    enter(sitter, font, "Reset")
}

/// Chooses the smallest resolution.
fn prefer(sitter: &mut dyn Sitter, font: &Font) -> anyhow::Result<()> {
    until_read(sitter, font, &["Unset"], SOON)?;
    // The second entry of the list is the smallest.
    sitter.press(Key::Enter)?;
    until_read(sitter, font, &["1280x1024", "Complete Entry"], SOON)?;
    sitter.press(Key::Down)?;
    sitter.press(Key::Enter)?;
    until_read(sitter, font, &["<640x480>", "Select Entry"], SOON)?;
    enter(sitter, font, "Commit Changes and Exit")?;
    until_read(sitter, font, &["Devices List", "Press ESC to exit"], SOON).map(drop)
}

/// Waits for the first press of the tablet's button, and prints its position. An event report ends
/// the loop; positions come before the button in it.
const CLICK: &str = r#"
event=$(sed -n '/USB tablet/,/^$/s/.*Handlers=.*\(event[0-9]*\).*/\1/p' /proc/bus/input/devices)
exec 3< /dev/input/$event
value() {
  echo $((0x${1:10:2}${1:8:2}))
}
echo listening
while :; do
  it=$(dd bs=24 count=1 <&3 2> /dev/null | hexdump -v -e '24/1 "%02x"' | cut -c 33-48)
  case $it in
    03000000*) x=$(value $it) ;;
    03000100*) y=$(value $it) ;;
    0100100101000000) down=yes ;;
    0000*) [ -z "$down" ] || break ;;
  esac
done
echo "clicked at $x $y"
"#;

/// The console is on the screen and the keyboard: its shell reads the typed text.
fn linux_is_used() -> anyhow::Result<()> {
    let modules = ["bochs", "xhci-pci", "usbhid", "hid-generic", "evdev"];
    let linux = Linux::new(guest(), &lab::asset("BZIMAGE_GENERIC")?)
        .modules(&lab::asset("MODULES_GENERIC")?, &modules)
        .cmdline("console=tty0 fbcon=nodefer vt.global_cursor_default=0")
        // Until the USB keyboard is there, typed text goes to the PS/2 keyboard, which buffers
        // little.
        .first(
            "while [ $(grep -c 'Name=.*USB' /proc/bus/input/devices) -lt 2 ]; do sleep 0.1; done",
        )
        .file("/click", CLICK);
    let mut desk = Desk::start(&LAB, linux.guest()?, BOOT)?;
    let mut viewer = Viewer::new(desk.vnc, &[])?;
    viewer.look_at(SIZE.0, SIZE.1);
    let mut font = Font::of_linux();
    // Two lines begin with the same word.
    let [begin, ready] = [">>>transom begin", ">>>transom ready"];
    let is_ready = |sight: &Sight| {
        let rows = font.rows(sight);
        let Ok((at @ 1.., row)) = last(&rows) else { return false };
        row.len() == ready.len() && rows[at - 1].get(..11) == Some(&row[..11])
    };
    let sight = viewer.until("desk-linux", BOOT, &mut |sight| is_ready(sight))?;
    let rows = font.rows(&sight);
    let (at, row) = last(&rows)?;
    font.learn(&rows[at - 1], begin)?;
    font.learn(row, ready)?;
    for letters in LETTERS {
        let (before, _) = last(&font.rows(&viewer.see()?))?;
        viewer.type_text(&format!("echo '{letters}'"))?;
        viewer.press(Key::Enter)?;
        // Three new rows: a mark, the answer, and a mark.
        let answered = |sight: &Sight| {
            let rows = font.rows(sight);
            last(&rows).is_ok_and(|it| it.0 == before + 3)
                && rows[before + 2].len() == letters.len()
        };
        let sight = viewer.until("desk-linux-letters", SOON, &mut |sight| answered(sight))?;
        font.learn(&font.rows(&sight)[before + 2], letters)?;
    }
    clicks(&mut viewer, &font, (123, 45))?;
    let mut page = Page::new(desk.web)?;
    // Neither click is at an edge, where the pointer leaves the viewer's window: the guest's driver
    // reports only changes.
    clicks(&mut page, &font, (700, 300))?;
    page.type_text("uname")?;
    page.press(Key::Enter)?;
    let words = ["clicked at", "\n>>>transom output\nLinux\n>>>transom done 0"];
    until_read(&mut page, &font, &words, SOON)?;
    until_read(&mut viewer, &font, &words, SOON)?;
    viewer.type_text("poweroff -f")?;
    viewer.press(Key::Enter)?;
    desk.running.ends_with(0, SOON)
}

/// Clicks at a pixel, and compares it with the position that the guest's driver reports.
fn clicks(sitter: &mut dyn Sitter, font: &Font, (x, y): (u16, u16)) -> anyhow::Result<()> {
    sitter.type_text("clear")?;
    sitter.press(Key::Enter)?;
    sitter.type_text("sh click")?;
    sitter.press(Key::Enter)?;
    until_read(sitter, font, &["listening"], SOON)?;
    sitter.click(x, y)?;
    let text = until_read(sitter, font, &["clicked at", ">>>transom done 0"], SOON)?;
    let place =
        text.lines().find_map(|line| line.strip_prefix("clicked at ")).context("no place")?;
    let parts = place.split_once(' ').with_context(|| format!("{place}: no place"))?;
    let got: (u32, u32) = (parts.0.parse()?, parts.1.parse()?);
    let near = |got: u32, pixel: u16, size: u32| {
        let wanted = u32::from(pixel) * 32767 / (size - 1);
        got.abs_diff(wanted) < 32767 / size
    };
    ensure!(near(got.0, x, SIZE.0) && near(got.1, y, SIZE.1), "({x}, {y}) arrived as {got:?}");
    say!("a click at ({x}, {y}) arrived as {got:?} of 32767");
    Ok(())
}
