//! A variable of the environment: a line of the list, which the reader, the help, the paper and the
//! tests go through.

use super::Settings;
use super::value::Value;
use crate::status::Status;

/// A variable.
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// Other names of the same; the name itself goes first where several are set.
    pub aliases: &'static [&'static str],
    /// What it is when nobody sets it; nothing where that depends.
    pub default: &'static str,
    /// What it does, in a sentence or two.
    pub meaning: &'static str,
    /// What becomes of it.
    pub fate: Fate,
    /// How the process ends when its value makes no sense.
    pub status: Status,
    /// Where its value goes.
    pub slot: Option<Slot>,
}

/// What becomes of a variable of the reference image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It does what it says.
    Done,
    /// It is worded for QEMU; what it becomes stands in the table of translations.
    Translated,
    /// It has no effect, which is said when it is set: this is what to do in its place.
    Ignored(&'static str),
    /// To go on without it would be wrong or unsafe: this is what to do in its place.
    Refused(&'static str),
}

/// A place in the settings, as functions: the type there is the parser.
pub struct Slot {
    /// What the type accepts, whether files may have it, and whether it is secret.
    pub kind: fn() -> Kind,
    /// Reads a text into the place.
    pub store: fn(&mut Settings, &str) -> anyhow::Result<()>,
    /// What is there.
    pub show: fn(&Settings) -> String,
    /// Whether both have the same there.
    pub same: fn(&Settings, &Settings) -> bool,
    /// What there is to say about what was read.
    pub notes: fn(&Settings) -> Vec<String>,
}

/// What is known of the type of a slot.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// What is accepted, in a few words.
    pub accepts: &'static str,
    /// Whether `NAME_FILE` exists.
    pub file: bool,
    /// Whether nobody may see the value.
    pub secret: bool,
    /// Whether an error may show it.
    pub shown: bool,
}

/// The kind of a place, by its type.
pub(super) fn kind_of<T: Value>(_: fn(&Settings) -> &T) -> Kind {
    let shown = T::SHOWN && !T::SECRET;
    Kind { accepts: T::ACCEPTS, file: T::FILE, secret: T::SECRET, shown }
}

impl Variable {
    /// The kind of its value; of what is not kept, nothing is known.
    pub fn kind(&self) -> Kind {
        let nothing = Kind { accepts: "", file: false, secret: false, shown: true };
        self.slot.as_ref().map_or(nothing, |slot| (slot.kind)())
    }

    /// Its name and its aliases.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        [self.name].into_iter().chain(self.aliases.iter().copied())
    }
}

/// The variables of a section, one line each below what they mean.
///
/// `done`, `translated`, `ignored` or `refused`; name and aliases; default; the place in the
/// settings; the exit status where it is not that of wrong usage; and what to do instead.
macro_rules! variables {
    ($($(#[doc = $meaning:literal])+
        $fate:ident $name:literal $(or $alias:literal)* = $default:literal
        $(($($place:tt)+))? $(: $status:ident)? $(=> $($instead:literal)+)?;)+) => {
        &[$($crate::settings::variable::Variable {
            name: $name,
            aliases: &[$($alias),*],
            default: $default,
            meaning: concat!($($meaning),+),
            fate: $crate::settings::variable::fate!($fate $($($instead)+)?),
            status: $crate::settings::variable::status!($($status)?),
            slot: $crate::settings::variable::slot!($($($place)+)?),
        }),+]
    };
}

macro_rules! fate {
    (done) => {
        $crate::settings::variable::Fate::Done
    };
    (translated) => {
        $crate::settings::variable::Fate::Translated
    };
    (ignored $($instead:literal)+) => {
        $crate::settings::variable::Fate::Ignored(concat!($($instead),+))
    };
    (refused $($instead:literal)+) => {
        $crate::settings::variable::Fate::Refused(concat!($($instead),+))
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
pub(crate) use {fate, slot, status, variables};
