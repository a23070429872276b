declare module "every-view"; // build.mjs makes this module, which registers all files of views/
