//! A pod with the user's install CD, seen in a browser.

use transom_tests::desk::{Key, Sitter};
use transom_tests::lab;
use transom_tests::novnc::Page;
use transom_tests::sight::Sight;

use crate::pod::{Pod, USER};
use crate::{BOOT, SIZE, SOON};

/// Colors of the installer's screen, as blue, green and red.
const BLUE: [u8; 3] = [0xaa, 0, 0];
const GREY: [u8; 3] = [0xaa; 3];

/// The pod boots the CD, because the disk is empty, and its menu reacts to keys.
pub(crate) fn is_seen_in_a_browser() -> anyhow::Result<()> {
    // In a mount namespace of its own, the CD is at the path where users mount theirs.
    let cd = lab::asset("INSTALL_CD")?;
    let mount = format!("touch /custom.iso && mount --bind {} /custom.iso", cd.display());
    let words = [("NETWORK", "none"), ("WIDTH", "800"), ("HEIGHT", "600")];
    let pod = Pod::start(&words, &mount, "pod")?;
    let mut page = Page::open(pod.web, Some(USER))?;
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
