//! Encodings, pseudo-encodings and levels that a client lists in `SetEncodings`.

use super::encode::{COPY_RECT, Encoding, Parameters};

/// Features that a client supports: pseudo-encodings (see [`number`]), and CopyRect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Features {
    pub copy: bool,
    pub resize: bool,
    pub screens: bool,
    pub last_rect: bool,
    pub name: bool,
    pub motion: bool,
    pub codes: bool,
    pub lights: bool,
    pub vmware_lights: bool,
    pub power: bool,
    pub fence: bool,
    pub continuous: bool,
    pub buttons: bool,
    pub clipboard: bool,
    pub pointer: Option<Pointer>,
}

/// Pointer image that the client draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pointer {
    /// Cursor: pixels in the client's format, and a mask.
    Masked,
    /// Cursor With Alpha
    Alpha,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preferences {
    /// The first encoding of its list that we support.
    pub encoding: Option<Encoding>,
    /// Quality of pictures, 0 to 9. Without it, encoding is lossless.
    pub quality: Option<u8>,
    /// Effort of compression, 0 to 9.
    pub compression: Option<u8>,
    /// QEMU Audio
    pub sound: bool,
    pub features: Features,
}

/// Numbers of the pseudo-encodings.
pub mod number {
    /// DesktopSize
    pub const RESIZE: i32 = -223;
    pub const LAST_RECT: i32 = -224;
    pub const CURSOR: i32 = -239;
    /// QEMU Pointer Motion Change
    pub const MOTION: i32 = -257;
    /// QEMU Extended Key Event
    pub const CODES: i32 = -258;
    /// QEMU Audio
    pub const SOUND: i32 = -259;
    /// QEMU LED State
    pub const LIGHTS: i32 = -261;
    /// DesktopName
    pub const NAME: i32 = -307;
    /// ExtendedDesktopSize
    pub const SCREENS: i32 = -308;
    /// xvp
    pub const POWER: i32 = -309;
    pub const FENCE: i32 = -312;
    pub const CONTINUOUS: i32 = -313;
    pub const ALPHA_CURSOR: i32 = -314;
    /// ExtendedMouseButtons
    pub const BUTTONS: i32 = -316;
    /// VMware LED State
    pub const VMWARE_LIGHTS: i32 = 0x574d_5668;
    /// Extended Clipboard
    pub const CLIPBOARD: i32 = 0xc0a1_e5ce_u32.cast_signed();
}

impl Preferences {
    /// Reads the list. Unknown numbers are ignored: clients send many that belong to other servers.
    pub fn read(numbers: &[i32]) -> Self {
        let mut preferences = Self::default();
        let features = &mut preferences.features;
        for number in numbers {
            let level = |first: i32| u8::try_from(number - first).ok();
            match *number {
                -32..=-23 => preferences.quality = level(-32),
                // Fine levels of TurboVNC, 0 to 100.
                -512..=-412 => {
                    let fine = level(-512).map(|it| (it / 11).min(9));
                    preferences.quality = preferences.quality.or(fine);
                }
                -256..=-247 => preferences.compression = level(-256),
                COPY_RECT => features.copy = true,
                number::RESIZE => features.resize = true,
                number::SCREENS => features.screens = true,
                number::LAST_RECT => features.last_rect = true,
                number::NAME => features.name = true,
                number::MOTION => features.motion = true,
                number::CODES => features.codes = true,
                number::SOUND => preferences.sound = true,
                number::LIGHTS => features.lights = true,
                number::VMWARE_LIGHTS => features.vmware_lights = true,
                number::POWER => features.power = true,
                number::FENCE => features.fence = true,
                number::CONTINUOUS => features.continuous = true,
                number::BUTTONS => features.buttons = true,
                number::CLIPBOARD => features.clipboard = true,
                number::CURSOR => features.pointer = Some(Pointer::Masked),
                number::ALPHA_CURSOR => {
                    features.pointer = features.pointer.or(Some(Pointer::Alpha));
                }
                other => {
                    preferences.encoding = preferences.encoding.or(Encoding::from_number(other));
                }
            }
        }
        preferences
    }

    /// The parameters for encoding. Each step of `slow` lowers the quality by one. If the client
    /// set no effort, any step raises the effort of compression.
    pub fn parameters(&self, slow: u8) -> Parameters {
        let encoding = self.encoding.unwrap_or(Encoding::Raw);
        // The quality is never lowered below 1, unless the client asked for 0.
        let quality = self.quality.map(|it| it.saturating_sub(slow).max(it.min(1)));
        let compression = self.compression.unwrap_or(if slow == 0 { 2 } else { 6 });
        Parameters { encoding, quality, compression }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn thousands_of_unknown_encodings_are_accepted() {
        let mut numbers: Vec<i32> = (1000..60_000).collect();
        numbers.extend([-26, -254, 1, 0, -223, -308, i32::MIN, i32::MAX, -312, 0x574d_5668]);
        let preferences = Preferences::read(&numbers);
        assert_eq!(preferences.encoding, Some(Encoding::Raw));
        assert_eq!((preferences.quality, preferences.compression), (Some(6), Some(2)));
        let features = preferences.features;
        assert!(
            features.copy
                && features.resize
                && features.screens
                && features.fence
                && features.vmware_lights
        );
        assert!(!features.continuous);
        assert_eq!(Preferences::read(&[]), Preferences::default());
    }

    #[test]
    fn a_slow_line_lowers_the_quality_to_a_minimum() {
        let preferences = Preferences::read(&[-24]);
        assert_eq!(preferences.parameters(0).quality, Some(8));
        assert_eq!(preferences.parameters(3).quality, Some(5));
        assert_eq!(preferences.parameters(99).quality, Some(1));
        assert_eq!(Preferences::read(&[-32]).parameters(9).quality, Some(0));
        assert_eq!(Preferences::read(&[7]).parameters(9).quality, None, "lossless stays lossless");
        assert_eq!(Preferences::read(&[-247]).parameters(9).compression, 9);
    }
}
