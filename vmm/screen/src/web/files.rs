//! The files of a page as the crate `pack` packed them: our own, and unmodified ones of others.

use std::convert::Infallible;
use std::io::Read as _;

use axum::body::{Body, Bytes};
use axum::http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, VARY,
};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use flate2::read::GzDecoder;
use futures_util::stream;

/// The viewer: our page with noVNC.
pub(super) const VIEWER: Folder = include!(concat!(env!("OUT_DIR"), "/web/files.rs"));

/// The path contains a hash of the content, so a changed file has another path.
const IMMUTABLE: &str = "public, max-age=31536000, immutable";
/// Bytes of a file that are unpacked and sent at once: anybody may ask for many large files, and
/// not read them.
const PIECE: usize = 16 << 10;
/// Pages contain details about the user.
const NO_STORE: &str = "no-store";

/// Files of a page, compressed.
#[derive(Clone, Copy)]
pub struct Folder {
    /// Relative to the page. The last part is a hash of the files.
    pub url: &'static str,
    /// Names below the URL, and contents.
    pub files: &'static [(&'static str, &'static [u8])],
}

impl Folder {
    /// Serves a file by the path after the first part of the URL. Browsers may keep it.
    pub fn file(self, path: &str, headers: &HeaderMap) -> Response {
        let hash = self.url.rsplit_once('/').map_or(self.url, |it| it.1);
        let name = path.strip_prefix(hash).and_then(|it| it.strip_prefix('/'));
        match name.and_then(|name| self.packed(name, headers)) {
            Some(mut response) => {
                let kept = HeaderValue::from_static(IMMUTABLE);
                response.headers_mut().insert(CACHE_CONTROL, kept);
                response
            }
            None => (StatusCode::NOT_FOUND, "There is no such file.\n").into_response(),
        }
    }

    /// Serves a page with its placeholders filled in.
    pub fn page(self, status: StatusCode, name: &str, fill: &[(&str, &str)]) -> Response {
        let mut text = unpacked(self.find(name).unwrap_or_default());
        for (mark, value) in fill {
            text = text.replace(mark, &escaped(value));
        }
        let head = [(CONTENT_TYPE, "text/html; charset=utf-8"), (CACHE_CONTROL, NO_STORE)];
        (status, head, text).into_response()
    }

    fn find(self, name: &str) -> Option<&'static [u8]> {
        self.files.iter().find(|(it, _)| *it == name).map(|(_, bytes)| *bytes)
    }

    fn packed(self, name: &str, headers: &HeaderMap) -> Option<Response> {
        let kind = match name.rsplit_once('.')?.1 {
            "js" => "text/javascript; charset=utf-8",
            "css" => "text/css; charset=utf-8",
            "svg" => "image/svg+xml",
            "webmanifest" => "application/manifest+json",
            // Pages have addresses of their own.
            "html" => return None,
            _ => "text/plain; charset=utf-8",
        };
        let bytes = self.find(name)?;
        let takes = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|it| it.to_str().ok());
        let mut takes = takes.flat_map(|it| it.split(',')).map(str::trim);
        let mut response = if takes.any(|it| it == "gzip" || it.starts_with("gzip;q=1")) {
            let pieces = bytes.chunks(PIECE).map(|piece| Ok::<_, Infallible>(Bytes::from(piece)));
            let mut response = Body::from_stream(stream::iter(pieces)).into_response();
            response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            response.headers_mut().insert(CONTENT_LENGTH, bytes.len().into());
            response
        } else {
            Body::from_stream(stream::unfold(GzDecoder::new(bytes), next_piece)).into_response()
        };
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        response.headers_mut().insert(VARY, HeaderValue::from_static("Accept-Encoding"));
        Some(response)
    }
}

async fn next_piece(
    mut file: GzDecoder<&'static [u8]>,
) -> Option<(Result<Vec<u8>, Infallible>, GzDecoder<&'static [u8]>)> {
    let mut piece = Vec::new();
    // The build wrote the file, so it is valid.
    file.by_ref().take(PIECE as u64).read_to_end(&mut piece).ok();
    (!piece.is_empty()).then_some((Ok(piece), file))
}

/// Decompresses a file. The build wrote it, so it is valid.
fn unpacked(bytes: &[u8]) -> String {
    let mut text = String::new();
    GzDecoder::new(bytes).read_to_string(&mut text).ok();
    text
}

/// Escapes a text for HTML.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;").replace('\'', "&#39;")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_pages_link_to_existing_files() {
        for name in ["index.html", "login.html"] {
            let text = unpacked(VIEWER.find(name).unwrap());
            let names: Vec<_> = text
                .split('"')
                .filter_map(|it| it.strip_prefix(VIEWER.url)?.strip_prefix('/'))
                .collect();
            assert!(names.len() >= 3, "{name}: {text}");
            for file in names {
                assert!(VIEWER.find(file).is_some(), "{name} names {file}");
            }
            assert!(!text.contains("<style") && !text.contains("style=\""), "{name}");
            assert!(!text.contains("=\"/") && !text.contains("http"), "{name}: relative only");
        }
    }

    #[test]
    fn novnc_is_complete_and_has_its_licence() {
        for (name, words) in [
            ("novnc/core/rfb.js", "export default class RFB"),
            ("novnc/vendor/pako/lib/zlib/inflate.js", "inflateInit"),
            ("novnc/LICENSE.txt", "MPL 2.0"),
            ("novnc/docs/LICENSE.MPL-2.0", "Mozilla Public License"),
        ] {
            let text = unpacked(VIEWER.find(name).unwrap());
            assert!(text.contains(words), "{name}");
        }
        let modules = VIEWER.files.iter().filter(|(name, _)| name.ends_with(".js"));
        for (name, bytes) in modules {
            let folder = name.rsplit_once('/').map_or("", |it| it.0);
            let text = unpacked(bytes);
            let imports = text.lines().filter_map(|line| {
                let line = line.trim();
                let is_import = line.starts_with("import ") || line.starts_with("} from ");
                is_import.then(|| line.split(['"', '\'']).nth(1)).flatten()
            });
            for import in imports {
                let mut path: Vec<_> = folder.split('/').filter(|it| !it.is_empty()).collect();
                for part in import.split('/') {
                    match part {
                        "." => {}
                        ".." => drop(path.pop()),
                        part => path.push(part),
                    }
                }
                assert!(VIEWER.find(&path.join("/")).is_some(), "{name} imports {import}");
            }
        }
    }

    #[test]
    fn text_in_a_page_is_escaped() {
        assert_eq!(escaped("<a href='x'>\"&"), "&lt;a href=&#39;x&#39;&gt;&quot;&amp;");
    }
}
