//! Keeps browsers logged in over a new start of the container, by a file of the volume.
//!
//! It is emptied at the start, and written at the end of the pod alone. So a logout holds, and
//! after a kill all browsers log in again; also if another pod on the volume was started in the
//! meantime. It stays open, because the pod may have no right to open it at its end.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FlockOperation, flock};
use screen::web::Sessions;

use crate::files;

/// Ending of the file.
pub const SESSIONS_FILE: &str = "sessions";

/// The emptied file, and the sessions of the pod before.
pub struct Earlier {
    file: File,
    text: String,
}

impl Earlier {
    /// Takes the sessions out of the file: a text that stayed there would be good again after a
    /// logout.
    pub fn take(path: &Path) -> io::Result<Self> {
        let text = files::if_there(files::read_itself(path));
        let mut file = None;
        files::write_for_owner(path, |empty| {
            file = Some(empty.try_clone()?);
            Ok(())
        })?;
        let file = file.ok_or_else(|| io::Error::other("nothing was written"))?;
        // The lock of a file that is being written would last as long as the pod.
        flock(&file, FlockOperation::Unlock)?;
        Ok(Self { file, text: text?.unwrap_or_default() })
    }

    pub fn resume(self, sessions: Arc<Sessions>) -> Logins {
        sessions.resume(&self.text);
        Logins { file: self.file, sessions }
    }
}

/// The file, and the sessions that it is to get.
pub struct Logins {
    file: File,
    sessions: Arc<Sessions>,
}

impl Logins {
    /// Nobody can log in or out anymore.
    pub fn keep(mut self) {
        if let Err(error) = self.file.write_all(self.sessions.text().as_bytes()) {
            tracing::warn!("web: browsers must log in again after a new start: {error}");
            // A part of a line is no session.
            self.file.set_len(0).ok();
        }
    }
}

#[cfg(test)]
mod test {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    #[test]
    fn sessions_are_read_once_and_written_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("windows.sessions");
        let line = |digit: &str| {
            let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
            format!("{} {now}\n", digit.repeat(64))
        };
        let open = || Earlier::take(&path).map(|earlier| earlier.resume(Arc::default()));
        open().unwrap().keep();
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
        fs::write(&path, line("a")).unwrap();
        let logins = open().unwrap();
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.len(), metadata.mode() & 0o777), (0, 0o600));
        // The one that nobody has used since.
        logins.keep();
        assert!(fs::read_to_string(&path).unwrap().starts_with(&"a".repeat(64)));
        // A pod that is killed keeps none.
        drop(open().unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
        // A link is replaced, and what it leads to stays.
        let other = folder.path().join("other");
        fs::write(&other, line("b")).unwrap();
        fs::remove_file(&path).unwrap();
        symlink(&other, &path).unwrap();
        assert!(open().is_err());
        open().unwrap().keep();
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
        assert_eq!(fs::read_to_string(&other).unwrap(), line("b"));
    }
}
