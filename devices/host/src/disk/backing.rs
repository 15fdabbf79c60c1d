//! The file below a qcow2 image, its backing file: which one may be read.
//!
//! Threats: an image names its backing file, and strangers or guests write images. That name could
//! make us read any file of the host. It is followed only within the image's own folder, after
//! links are resolved, unless the user allows more. It is never followed to the network.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::format::Format;

/// The backing file that a qcow2 image may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BackingFile {
    /// The one that the image names, in the image's own folder.
    #[default]
    OwnFolder,
    /// The one that the image names, in any folder.
    Anywhere,
    /// This one, whatever the image names. Its format follows from its name.
    This(PathBuf),
}

impl BackingFile {
    /// The backing file of the image at `image`, which names it and its format.
    pub(super) fn find(
        &self,
        image: &Path,
        name: &str,
        format: Option<&str>,
    ) -> anyhow::Result<(PathBuf, Option<Format>)> {
        if let Self::This(path) = self {
            return Ok((path.clone(), None));
        }
        let path = self.follow(image, name)?;
        let format = match format {
            Some("qcow2") => Some(Format::Qcow2),
            Some("raw" | "file") => Some(Format::Raw),
            None => None,
            Some(other) => {
                bail!("its backing file {name} has the format {other}, which is not supported")
            }
        };
        Ok((path, format))
    }

    /// The rule for the backing file itself, if it has another one below.
    pub(super) fn below(&self) -> Self {
        match self {
            Self::Anywhere => Self::Anywhere,
            _ => Self::OwnFolder,
        }
    }

    /// The resolved path of a name, if it is allowed.
    fn follow(&self, image: &Path, name: &str) -> anyhow::Result<PathBuf> {
        let plain = name.strip_prefix("file:").unwrap_or(name);
        let scheme = plain.split('/').next().is_some_and(|first| first.contains(':'));
        ensure!(!scheme, "its backing file {name} is not a file, and only files are supported");
        let image = image.canonicalize().with_context(|| image.display().to_string())?;
        let folder = image.parent().unwrap_or(Path::new("/"));
        // An absolute name replaces the folder.
        let wanted = folder.join(plain);
        let context = || format!("its backing file {}", wanted.display());
        let path = wanted.canonicalize().with_context(context)?;
        ensure!(
            *self == Self::Anywhere || path.parent() == Some(folder),
            "its backing file {name} is not in its own folder: set `backing=on` if you trust the \
             image"
        );
        Ok(path)
    }
}

impl Serialize for BackingFile {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::OwnFolder => serializer.serialize_bool(false),
            Self::Anywhere => serializer.serialize_bool(true),
            Self::This(path) => path.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for BackingFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl Visitor<'_> for Form {
            type Value = BackingFile;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a boolean, or the path of a file")
            }

            fn visit_bool<E: de::Error>(self, on: bool) -> Result<BackingFile, E> {
                Ok(if on { BackingFile::Anywhere } else { BackingFile::OwnFolder })
            }

            fn visit_str<E: de::Error>(self, path: &str) -> Result<BackingFile, E> {
                if path.is_empty() {
                    return Err(E::custom("an empty path"));
                }
                Ok(BackingFile::This(path.into()))
            }
        }
        deserializer.deserialize_any(Form)
    }
}
