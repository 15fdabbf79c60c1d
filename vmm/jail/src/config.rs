//! The configuration of the jail: the value of `--jail`.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The value of `--jail`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    pub mode: Mode,
    /// The user that the process switches to, which needs root.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
    /// Further folders whose files may be opened later, besides those of the machine's disks and
    /// media.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folders: Option<Folders>,
    pub seccomp: Seccomp,
    pub landlock: Landlock,
    /// Whether debuggers and core dumps are allowed.
    pub debug: bool,
}

/// How strict the jail is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The strictest jail that still allows every control command, such as opening new disks.
    #[default]
    Auto,
    Off,
    /// All restrictions that this host supports.
    On,
    /// All restrictions; fails if one is not supported.
    Must,
}

/// How a system call that is not on the list is handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Seccomp {
    /// It ends the process.
    #[default]
    On,
    Off,
    /// It is allowed, and the kernel logs it.
    Log,
}

/// Whether Landlock restricts access to files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Landlock {
    #[default]
    On,
    Off,
}

/// A user and a group, by their IDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct User {
    pub user: u32,
    pub group: u32,
}

impl TryFrom<String> for User {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (user, group) = text.split_once(':').unwrap_or((&text, &text));
        // The largest number means "unchanged" to the kernel.
        let number = |text: &str| text.parse().ok().filter(|number| (1..u32::MAX).contains(number));
        match (number(user), number(group)) {
            (Some(user), Some(group)) => Ok(Self { user, group }),
            _ => Err(format!("`{text}` is not a user: write UID or UID:GID, as numbers above 0")),
        }
    }
}

impl From<User> for String {
    fn from(user: User) -> Self {
        user.to_string()
    }
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.user, self.group)
    }
}

/// Separated by `:` in text form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Folders(pub Vec<PathBuf>);

impl TryFrom<String> for Folders {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text.split(':').any(str::is_empty) {
            return Err(format!("`{text}` has an empty path: write PATH or PATH:PATH"));
        }
        Ok(Self(text.split(':').map(PathBuf::from).collect()))
    }
}

impl From<Folders> for String {
    fn from(folders: Folders) -> Self {
        let paths: Vec<_> = folders.0.iter().map(|path| path.display().to_string()).collect();
        paths.join(":")
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use host::keyvalue;

    #[test]
    fn options_are_parsed_and_errors_name_them() {
        let read = |text: &str| keyvalue::parse::<Config>(text, Some("mode"));
        let all = read("must,user=7:8,folders=/a:/b,seccomp=log,landlock=off,debug").unwrap();
        assert_eq!(all.user, Some(User { user: 7, group: 8 }));
        assert_eq!(all.folders, Some(Folders(vec!["/a".into(), "/b".into()])));
        assert_eq!((all.mode, all.debug), (Mode::Must, true));
        assert_eq!(read("on,user=7").unwrap().user, Some(User { user: 7, group: 7 }));
        for (text, words) in [
            ("yes", "`auto`"),
            ("on,user=root", "UID or UID:GID"),
            ("on,user=0", "above 0"),
            ("on,user=1:4294967295", "above 0"),
            ("on,folders=/a:", "empty path"),
            ("on,secomp=off", "did you mean `seccomp`"),
        ] {
            let error = format!("{:#}", read(text).unwrap_err());
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
