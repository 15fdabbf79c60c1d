//! Encodings, pseudo-encodings and levels that a client lists in `SetEncodings`.

use super::encode::{COPY_RECT, Choice, Encoding};

/// Features that a client supports: pseudo-encodings, and CopyRect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// CopyRect
    pub copy: bool,
    /// DesktopSize
    pub resize: bool,
    /// ExtendedDesktopSize
    pub screens: bool,
    /// LastRect
    pub last_rect: bool,
    /// DesktopName
    pub name: bool,
    /// QEMU Pointer Motion Change
    pub motion: bool,
    /// QEMU Extended Key Event
    pub codes: bool,
    /// QEMU LED State
    pub lights: bool,
    /// VMware LED State
    pub vmware_lights: bool,
    /// xvp
    pub power: bool,
    /// Fence
    pub fence: bool,
    /// ContinuousUpdates
    pub continuous: bool,
    /// ExtendedMouseButtons
    pub buttons: bool,
    /// Extended Clipboard
    pub clipboard: bool,
    /// The kind of pointer that the client draws.
    pub pointer: Option<Pointer>,
}

/// A kind of pointer image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pointer {
    /// Cursor: pixels in the client's format, and a mask.
    Masked,
    /// Cursor With Alpha
    Alpha,
}

/// Preferences and features of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// The first encoding of its list that we support.
    pub encoding: Option<Encoding>,
    /// Quality of pictures, 0 to 9. Without it, encoding is lossless.
    pub quality: Option<u8>,
    /// Effort of compression, 0 to 9.
    pub compression: Option<u8>,
    /// Supported features.
    pub can: Abilities,
}

/// Numbers of the pseudo-encodings.
pub mod number {
    /// DesktopSize
    pub const RESIZE: i32 = -223;
    /// LastRect
    pub const LAST_RECT: i32 = -224;
    /// Cursor
    pub const CURSOR: i32 = -239;
    /// QEMU Pointer Motion Change
    pub const MOTION: i32 = -257;
    /// QEMU Extended Key Event
    pub const CODES: i32 = -258;
    /// QEMU LED State
    pub const LIGHTS: i32 = -261;
    /// DesktopName
    pub const NAME: i32 = -307;
    /// ExtendedDesktopSize
    pub const SCREENS: i32 = -308;
    /// xvp
    pub const POWER: i32 = -309;
    /// Fence
    pub const FENCE: i32 = -312;
    /// ContinuousUpdates
    pub const CONTINUOUS: i32 = -313;
    /// Cursor With Alpha
    pub const ALPHA_CURSOR: i32 = -314;
    /// ExtendedMouseButtons
    pub const BUTTONS: i32 = -316;
    /// VMware LED State
    pub const VMWARE_LIGHTS: i32 = 0x574d_5668;
    /// Extended Clipboard
    pub const CLIPBOARD: i32 = 0xc0a1_e5ce_u32.cast_signed();
}

impl Wishes {
    /// Reads the list. Unknown numbers are ignored: clients send many that belong to other servers.
    pub fn read(numbers: &[i32]) -> Self {
        let mut wishes = Self::default();
        let can = &mut wishes.can;
        for number in numbers {
            let level = |first: i32| u8::try_from(number - first).ok();
            match *number {
                -32..=-23 => wishes.quality = level(-32),
                // Fine levels of TurboVNC, 0 to 100.
                -512..=-412 => {
                    let fine = level(-512).map(|it| (it / 11).min(9));
                    wishes.quality = wishes.quality.or(fine);
                }
                -256..=-247 => wishes.compression = level(-256),
                COPY_RECT => can.copy = true,
                number::RESIZE => can.resize = true,
                number::SCREENS => can.screens = true,
                number::LAST_RECT => can.last_rect = true,
                number::NAME => can.name = true,
                number::MOTION => can.motion = true,
                number::CODES => can.codes = true,
                number::LIGHTS => can.lights = true,
                number::VMWARE_LIGHTS => can.vmware_lights = true,
                number::POWER => can.power = true,
                number::FENCE => can.fence = true,
                number::CONTINUOUS => can.continuous = true,
                number::BUTTONS => can.buttons = true,
                number::CLIPBOARD => can.clipboard = true,
                number::CURSOR => can.pointer = Some(Pointer::Masked),
                number::ALPHA_CURSOR => can.pointer = can.pointer.or(Some(Pointer::Alpha)),
                other => wishes.encoding = wishes.encoding.or(Encoding::from_number(other)),
            }
        }
        wishes
    }

    /// The parameters for encoding. Each step of `slow` lowers the quality by one. If the client
    /// set no effort, any step raises the effort of compression.
    pub fn choice(&self, slow: u8) -> Choice {
        let encoding = self.encoding.unwrap_or(Encoding::Raw);
        // The quality is never lowered below 1, unless the client asked for 0.
        let quality = self.quality.map(|it| it.saturating_sub(slow).max(it.min(1)));
        let compression = self.compression.unwrap_or(if slow == 0 { 2 } else { 6 });
        Choice { encoding, quality, compression }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn thousands_of_unknown_numbers_are_fine() {
        let mut numbers: Vec<i32> = (1000..60_000).collect();
        numbers.extend([-26, -254, 1, 0, -223, -308, i32::MIN, i32::MAX, -312, 0x574d_5668]);
        let wishes = Wishes::read(&numbers);
        assert_eq!(wishes.encoding, Some(Encoding::Raw));
        assert_eq!((wishes.quality, wishes.compression), (Some(6), Some(2)));
        let can = wishes.can;
        assert!(can.copy && can.resize && can.screens && can.fence && can.vmware_lights);
        assert!(!can.continuous);
        assert_eq!(Wishes::read(&[]), Wishes::default());
    }

    #[test]
    fn a_slow_line_lowers_the_quality_that_was_asked_for_and_never_below_the_least() {
        let wishes = Wishes::read(&[-24]);
        assert_eq!(wishes.choice(0).quality, Some(8));
        assert_eq!(wishes.choice(3).quality, Some(5));
        assert_eq!(wishes.choice(99).quality, Some(1));
        assert_eq!(Wishes::read(&[-32]).choice(9).quality, Some(0));
        assert_eq!(Wishes::read(&[7]).choice(9).quality, None, "lossless stays lossless");
        assert_eq!(Wishes::read(&[-247]).choice(9).compression, 9);
    }
}
