//! A variable of the environment: one row of the list, from which parser, help, reference and tests
//! are derived.

use super::Settings;
use super::value::Value;
use crate::status::Status;

pub struct Variable {
    pub name: &'static str,
    /// Other names. `name` takes precedence where several are set.
    pub aliases: &'static [&'static str],
    /// Empty if the default depends on other settings.
    pub default: &'static str,
    /// One or two sentences.
    pub meaning: &'static str,
    pub support: Support,
    /// The exit status for an invalid value.
    pub status: Status,
    /// The field that stores the value. Ignored variables have none.
    pub slot: Option<Slot>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    Full,
    /// Supported in QEMU's words, which the table of translations maps to ours.
    Translated,
    /// Has no effect, and a warning is logged when it is set. The text says what to do instead.
    Ignored(&'static str),
}

/// Access to a field of the settings. The field's type is the parser.
pub struct Slot {
    pub kind: fn() -> Kind,
    pub store: fn(&mut Settings, &str) -> anyhow::Result<()>,
    pub show: fn(&Settings) -> String,
    pub same: fn(&Settings, &Settings) -> bool,
    pub notes: fn(&Settings) -> Vec<String>,
}

/// Properties of a field's type.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub accepts: &'static str,
    /// Whether `NAME_FILE` exists.
    pub file: bool,
    pub secret: bool,
    /// Whether an error may show the value.
    pub shown: bool,
    /// Whether an invalid value is ignored with a warning.
    pub lenient: bool,
}

pub(super) fn kind_of<T: Value>(_: fn(&Settings) -> &T) -> Kind {
    let shown = T::SHOWN && !T::SECRET;
    let (file, secret, lenient) = (T::FILE, T::SECRET, T::LENIENT);
    Kind { accepts: T::ACCEPTS, file, secret, shown, lenient }
}

impl Variable {
    /// A variable without a slot is neither secret nor read from a file.
    pub fn kind(&self) -> Kind {
        let [file, secret, lenient] = [false; 3];
        let nothing = Kind { accepts: "", file, secret, shown: true, lenient };
        self.slot.as_ref().map_or(nothing, |slot| (slot.kind)())
    }

    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        [self.name].into_iter().chain(self.aliases.iter().copied())
    }
}

/// The variables of a section, one row each. The doc comment above a row is its description.
///
/// A row has the support (`full`, `translated` or `ignored`), the name and its aliases,
/// the default, the field in the settings, the exit status (unless it is that of wrong usage), and
/// the text on what to do instead.
macro_rules! variables {
    ($($(#[doc = $meaning:literal])+
        $support:ident $name:literal $(or $alias:literal)* = $default:literal
        $(($($place:tt)+))? $(: $status:ident)? $(=> $($instead:literal)+)?;)+) => {
        &[$($crate::settings::variable::Variable {
            name: $name,
            aliases: &[$($alias),*],
            default: $default,
            meaning: concat!($($meaning),+),
            support: $crate::settings::variable::support!($support $($($instead)+)?),
            status: $crate::settings::variable::status!($($status)?),
            slot: $crate::settings::variable::slot!($($($place)+)?),
        }),+]
    };
}

macro_rules! support {
    (full) => {
        $crate::settings::variable::Support::Full
    };
    (translated) => {
        $crate::settings::variable::Support::Translated
    };
    (ignored $($instead:literal)+) => {
        $crate::settings::variable::Support::Ignored(concat!($($instead),+))
    };
}

macro_rules! status {
    () => {
        $crate::status::Status::Usage
    };
    ($status:ident) => {
        $crate::status::Status::$status
    };
}

macro_rules! slot {
    () => {
        None
    };
    ($($place:tt)+) => {
        Some($crate::settings::variable::Slot {
            kind: || $crate::settings::variable::kind_of(|settings| &settings.$($place)+),
            store: |settings, text| {
                settings.$($place)+ = $crate::settings::value::Value::read(text)?;
                Ok(())
            },
            show: |settings| $crate::settings::value::Value::show(&settings.$($place)+),
            same: |one, other| one.$($place)+ == other.$($place)+,
            notes: |settings| $crate::settings::value::Value::notes(&settings.$($place)+),
        })
    };
}
pub(crate) use {slot, status, support, variables};
